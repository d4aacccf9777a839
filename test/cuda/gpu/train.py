"""A training loop with a known result: two runs print the same losses, bit for bit.

train.py WIDTH LAYERS STEPS [--pause]   prints "ready PID", "step N SECONDS LOSS" and "end SHA LOSS"
With --pause it waits at step 40 % for a line on standard input, and goes on then.
"""
import hashlib
import os
import sys
import time

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
import torch

width, layers, steps = (int(a) for a in sys.argv[1:4])
torch.manual_seed(1)
torch.use_deterministic_algorithms(True)
torch.backends.cuda.matmul.allow_tf32 = False
dev = torch.device("cuda:0")
model = torch.nn.Sequential(*[m for _ in range(layers) for m in (torch.nn.Linear(width, width), torch.nn.Tanh())]).to(dev)
opt = torch.optim.Adam(model.parameters(), lr=1e-4)
gen = torch.Generator(device=dev)
gen.manual_seed(2)
x = torch.randn(64, width, generator=gen, device=dev)
y = torch.randn(64, width, generator=gen, device=dev)
digest = hashlib.sha256()
print("ready", os.getpid(), flush=True)
for n in range(steps):
    began = time.perf_counter()
    opt.zero_grad()
    loss = torch.nn.functional.mse_loss(model(x), y)
    loss.backward()
    opt.step()
    value = loss.item()
    digest.update(value.hex().encode())
    print("step", n, f"{time.perf_counter() - began:.6f}", value.hex(), flush=True)
for p in model.parameters():
    digest.update(p.detach().cpu().numpy().tobytes())
print("end", digest.hexdigest()[:16], value.hex(), f"{torch.cuda.max_memory_allocated()/2**30:.2f}GiB", flush=True)
