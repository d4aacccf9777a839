"""Programs of other libraries, each with a result that is checked by itself.

others.py jax|cupy|inference|graph|loader|pinned|both|ipc   prints "ready PID" and, at the end of its input, "ok" or "bad"
"""
import os
import select
import sys

kind = sys.argv[1]


def told():
    return bool(select.select([sys.stdin], [], [], 0)[0])


def main():
    if kind == "jax":
        os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
        import jax
        import jax.numpy as jnp
        import numpy as np

        a = jnp.eye(512, dtype=jnp.int32)
        step = jax.jit(lambda v, n: jnp.roll(v, 1, axis=0) + n)
        want, n = np.eye(512, dtype=np.int32), 0
        step(a, 0).block_until_ready()
        print("ready", os.getpid(), flush=True)
        while not told():
            a = step(a, n % 7)
            a.block_until_ready()
            want, n = np.roll(want, 1, axis=0) + n % 7, n + 1
        return (np.asarray(a) == want).all()
    if kind == "cupy":
        import cupy as cp
        import numpy as np

        a, want, n = cp.arange(1 << 16, dtype=cp.int64), np.arange(1 << 16, dtype=np.int64), 0
        a = a * 1
        print("ready", os.getpid(), flush=True)
        while not told():
            a, want, n = (a * 3 + n) & 0xFFFFFFFF, (want * 3 + n) & 0xFFFFFFFF, n + 1
            cp.cuda.Device().synchronize()
        return (a.get() == want).all()
    import torch

    torch.manual_seed(3)
    if kind == "loader":  # children that are forked and keep descriptors
        x = torch.ones(8, device="cuda")
        data = torch.utils.data.TensorDataset(torch.arange(1 << 20))
        it = iter(torch.utils.data.DataLoader(data, batch_size=16, num_workers=2))
        print("ready", os.getpid(), flush=True)
        total = 0
        while not told():
            try:
                (b,) = next(it)
            except StopIteration:
                it = iter(torch.utils.data.DataLoader(data, batch_size=16, num_workers=2))
                continue
            total += int((b.cuda() * x[0]).sum())
        return total > 0
    if kind == "pinned":
        h = torch.arange(1 << 22, dtype=torch.int32).pin_memory()
        d = torch.empty_like(h, device="cuda")
        s = torch.cuda.Stream()
        print("ready", os.getpid(), flush=True)
        ok, n = True, 0
        while not told():
            with torch.cuda.stream(s):
                d.copy_(h, non_blocking=True)
                d += n
                back = d.to("cpu", non_blocking=False)
            s.synchronize()
            ok, n = ok and bool((back == h + n).all()), n + 1
        return ok
    if kind == "graph":
        a = torch.ones(1 << 20, device="cuda")
        g = torch.cuda.CUDAGraph()
        s = torch.cuda.Stream()
        with torch.cuda.stream(s):
            for _ in range(3):
                a.mul_(1.0)
        torch.cuda.synchronize()
        with torch.cuda.graph(g):
            a.add_(1.0)
        a.fill_(0)
        n = 0
        print("ready", os.getpid(), flush=True)
        while not told():
            g.replay()
            torch.cuda.synchronize()
            n += 1
            if n % 1000 == 0:
                a.fill_(0)
                n = 0
        return bool((a == n).all())
    if kind == "inference":
        m = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(256, 4, batch_first=True), 4).cuda().eval()
        x = torch.randn(4, 64, 256, device="cuda")
        with torch.no_grad():
            want = m(x)
            torch.cuda.synchronize()
            print("ready", os.getpid(), flush=True)
            ok = True
            while not told():
                ok = ok and torch.equal(m(x), want)
        return ok
    if kind == "both":  # OpenCL of NVIDIA's platform beside CUDA
        import ctypes
        import glob

        lib = (glob.glob("/usr/local/nvidia/lib64/libnvidia-opencl.so.1") + glob.glob("/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.1"))[0]
        os.environ["OCL_ICD_VENDORS"] = os.environ["OCL_ICD_FILENAMES"] = lib
        cl = ctypes.CDLL("libOpenCL.so.1")
        V, err = ctypes.c_void_p, ctypes.c_int()
        plat, dev = V(), V()
        for f in ("clCreateContext", "clCreateCommandQueue", "clCreateBuffer"):
            getattr(cl, f).restype = V
        if cl.clGetPlatformIDs(1, ctypes.byref(plat), None) or cl.clGetDeviceIDs(plat, ctypes.c_ulong(4), 1, ctypes.byref(dev), None):
            return False
        ctx = V(cl.clCreateContext(None, 1, ctypes.byref(dev), None, None, ctypes.byref(err)))
        q = V(cl.clCreateCommandQueue(ctx, dev, ctypes.c_ulong(0), ctypes.byref(err)))
        data = os.urandom(1 << 20)
        buf = V(cl.clCreateBuffer(ctx, ctypes.c_ulong(33), ctypes.c_size_t(len(data)), ctypes.create_string_buffer(data, len(data)), ctypes.byref(err)))
        back = ctypes.create_string_buffer(len(data))
        a = torch.zeros(1 << 20, device="cuda", dtype=torch.int32)
        print("ready", os.getpid(), flush=True)
        ok, n = True, 0
        while not told():
            a += 1
            n += 1
            ok = ok and not cl.clEnqueueReadBuffer(q, buf, 1, ctypes.c_size_t(0), ctypes.c_size_t(len(data)), back, 0, None, None) and back.raw == data
        return ok and bool((a == n).all())
    if kind == "ipc":
        a = torch.ones(1 << 20, device="cuda")
        handle = a.untyped_storage()._share_cuda_()
        print("ready", os.getpid(), flush=True)
        while not told():
            a.add_(1)
            torch.cuda.synchronize()
        return handle is not None
    raise SystemExit("unknown " + kind)


try:
    good = main()
except Exception as e:  # the result is what is judged
    print("bad", type(e).__name__, str(e)[:200], flush=True)
    sys.exit(1)
print("ok" if good else "bad", flush=True)
os._exit(0 if good else 1)
