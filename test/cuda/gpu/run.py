"""What the engine driver does on real GPUs, beside the driver alone. Runs as root on a machine
with NVIDIA's driver, python3 with PyTorch, and no Go: bin/gpuguest and test/cuda/bin are carried.

run.py [--parts a,b,c] [--out DIR] [--limit SECONDS]
"""
import argparse
import ctypes
import hashlib
import json
import os
import re
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time

ROOT = os.path.abspath(os.path.join(os.path.dirname(__file__), "../../.."))
GUEST = os.path.join(ROOT, "bin/gpuguest")
LOOP = os.path.join(ROOT, "test/cuda/bin/cudaloop")
HERE = os.path.dirname(os.path.abspath(__file__))
arg = argparse.ArgumentParser()
arg.add_argument("--parts", default="")
arg.add_argument("--out", default=os.environ.get("OUT", "/tmp/cuda-out"))
arg.add_argument("--limit", type=float, default=540)
arg.add_argument("--width", type=int, default=8192)
arg.add_argument("--big", type=int, default=16384, help="MiB of the large process")
arg.add_argument("--dev", default="", help="folder of the nodes of a fake driver")
opt = arg.parse_args()
os.makedirs(opt.out, exist_ok=True)
BEGAN = time.time()
FACTS = {}
log = open(os.path.join(opt.out, "cuda.log"), "w")


def say(*words):
    text = f"[{time.time()-BEGAN:6.1f}] " + " ".join(str(w) for w in words)
    print(text, flush=True)
    print(text, file=log, flush=True)


def fact(key, value):
    FACTS[key] = value
    say("FACT", key, json.dumps(value))
    with open(os.path.join(opt.out, "cuda.json"), "w") as f:
        json.dump(FACTS, f, indent=1)


def left():
    return opt.limit - (time.time() - BEGAN)


class Program:
    """A program in a session of its own, whose parent is not this one."""

    def __init__(self, *cmd, user=None, env=None):
        if user:
            cmd = ("setpriv", f"--reuid={user}", f"--regid={user}", "--clear-groups") + cmd
        self.p = subprocess.Popen(("setsid", "-w") + cmd, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                  env={**os.environ, **(env or {})})
        self.lines, self.bell = [], threading.Condition()
        threading.Thread(target=self.read, daemon=True).start()
        line = self.wait(r"^ready (\d+)", 120)
        self.pid = int(line.group(1)) if line else 0
        if not self.pid:
            say("not ready:", cmd, self.lines[-5:])

    def read(self):
        for line in self.p.stdout:
            with self.bell:
                self.lines.append(line.rstrip())
                self.bell.notify_all()
        with self.bell:
            self.lines.append("EOF")
            self.bell.notify_all()

    def wait(self, pattern, seconds):
        end, at = time.time() + seconds, 0
        with self.bell:
            while True:
                while at < len(self.lines):
                    m = re.search(pattern, self.lines[at])
                    if m:
                        return m
                    if self.lines[at] == "EOF":
                        return None
                    at += 1
                if time.time() > end:
                    return None
                self.bell.wait(max(0.05, end - time.time()))

    def stop(self, seconds=120):
        try:
            self.p.stdin.write("stop\n")
            self.p.stdin.close()
        except OSError:
            pass
        try:
            self.p.wait(seconds)
        except subprocess.TimeoutExpired:
            say("does not end:", self.pid)
            self.kill()
            return "does not end"
        return [line for line in self.lines if line != "EOF"][-1] if len(self.lines) > 1 else "no output"

    def kill(self):
        try:
            os.kill(self.pid, signal.SIGKILL)
        except OSError:
            pass


def guest(kind, pid, *args, env=None, rundir=None):
    """Runs one operation; returns its JSON, the milliseconds that it says, and its error."""
    cmd = [GUEST, "driver", kind, "--pid", str(pid), "--rundir", rundir or "/tmp/cuda-run", *args] + (["--dev", opt.dev] if opt.dev else [])
    began = time.time()
    try:
        r = subprocess.run(cmd, capture_output=True, text=True, timeout=max(30, min(200, left() + 30)), env={**os.environ, **(env or {})})
    except subprocess.TimeoutExpired:
        say("TIMEOUT", *cmd)
        return {}, 0.0, "timeout"
    wall = time.time() - began
    print("$", *cmd, "\n", r.stdout, r.stderr, file=log, flush=True)
    body, took = r.stdout, 0.0
    m = re.search(r"^took ([\d.]+) ms$", body, re.M)
    if m:
        took, body = float(m.group(1)), body[: m.start()]
    try:
        doc = json.loads(body)
    except ValueError:
        doc = {}
    err = "" if r.returncode == 0 else r.stderr.strip()[-300:] + " " + str(doc.get("error", "")) + str(doc.get("trouble", "")) + json.dumps(doc.get("reasons", doc.get("refused", "")))
    return doc, took or wall * 1000, err.strip()


def stopped(doc):
    return int(doc.get("stoppedNs", 0)) / 1e9


def steps(doc):
    return {s["step"]: round(int(s.get("durationNs", 0)) / 1e9, 3) for s in doc.get("steps", [])}


ALONE = r"""
import ctypes, sys, time, json, uuid
cu = ctypes.CDLL("libcuda.so.1")
r = cu.cuInit(0)
pid = int(sys.argv[1]); pairs = sys.argv[2:]
class Args(ctypes.Structure):
    _fields_ = [("p", ctypes.c_void_p), ("n", ctypes.c_uint), ("rest", ctypes.c_char * 52)]
lock, none, res = (ctypes.c_uint * 16)(10000), (ctypes.c_uint * 16)(), Args()
if pairs:
    b = b"".join(uuid.UUID(u[4:]).bytes for p in pairs for u in p.split("="))
    buf = ctypes.create_string_buffer(b, len(b)); res.p = ctypes.addressof(buf); res.n = len(pairs)
out = {"init": r}
def call(name, f, a):
    t = time.perf_counter(); c = f(pid, ctypes.byref(a)); out[name] = [c, time.perf_counter() - t]
began = time.perf_counter()
call("lock", cu.cuCheckpointProcessLock, lock)
call("checkpoint", cu.cuCheckpointProcessCheckpoint, none)
call("restore", cu.cuCheckpointProcessRestore, res)
call("unlock", cu.cuCheckpointProcessUnlock, none)
out["total"] = time.perf_counter() - began
print(json.dumps(out))
"""


def alone(pid, *pairs):
    """The driver's four calls, one after the other, in one process."""
    r = subprocess.run([sys.executable, "-c", ALONE, str(pid), *pairs], capture_output=True, text=True, timeout=200)
    print(r.stdout, r.stderr, file=log, flush=True)
    return json.loads(r.stdout)


def compare(name, pid, times, *args):
    """The driver alone and gpuctl's rehearsal, in turns."""
    a, o, parts = [], [], []
    for _ in range(times):
        if left() < 60:
            break
        d = alone(pid)
        if any(d[k][0] for k in ("lock", "checkpoint", "restore", "unlock")):
            fact(name + " alone failed", d)
            return
        a.append(d["total"])
        parts.append({k: round(d[k][1], 3) for k in ("lock", "checkpoint", "restore", "unlock")})
        doc, _, err = guest("rehearse", pid, "--canary=false", *args)
        if err:
            fact(name + " ours failed", err)
            return
        o.append(stopped(doc))
        parts.append(steps(doc))
    if a:
        fact(name, {"alone_s": [round(v, 3) for v in a], "ours_s": [round(v, 3) for v in o],
                    "ratio_of_medians": round(statistics.median(o) / statistics.median(a), 4), "parts": parts})


def nodes(pid):
    found = {}
    try:
        for fd in os.listdir(f"/proc/{pid}/fd"):
            try:
                t = os.readlink(f"/proc/{pid}/fd/{fd}")
            except OSError:
                continue
            if "/dev/nvidia" in t:
                found[t] = found.get(t, 0) + 1
        maps = open(f"/proc/{pid}/maps").read()
        found["maps"] = len(re.findall(r"/dev/nvidia\S*", maps))
    except OSError as e:
        found["error"] = str(e)
    return found


def smi():
    r = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"], capture_output=True, text=True)
    m = subprocess.run(["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader"], capture_output=True, text=True)
    return {"apps": r.stdout.strip().splitlines(), "used": m.stdout.strip().splitlines()}


def part_machine():
    r = subprocess.run(["nvidia-smi", "--query-gpu=index,uuid,name,driver_version,persistence_mode,mig.mode.current,pci.device_id,pci.bus_id,memory.total", "--format=csv"], capture_output=True, text=True)
    fact("gpus", r.stdout.strip().splitlines())
    r = subprocess.run([GUEST, "driver", "devices"], capture_output=True, text=True)
    print(r.stdout, r.stderr, file=log)
    fact("devices", json.loads(r.stdout) if r.returncode == 0 else r.stderr)
    fact("kernel", os.uname().release)
    fact("thp", open("/sys/kernel/mm/transparent_hugepage/enabled").read().strip())


def part_basic():
    p = Program(LOOP, "--mib", "256")
    if not p.pid:
        fact("cudaloop", p.lines)
        return
    fact("nodes running", nodes(p.pid))
    took = [guest("adopt", p.pid)[1] for _ in range(5)]
    plan = []
    for _ in range(5):
        doc, ms, err = guest("plan", p.pid)
        plan.append(ms)
        if err:
            fact("plan refused", err)
    fact("adopt_ms", took)
    fact("plan_ms", plan)
    doc, ms, err = guest("rehearse", p.pid)
    fact("rehearse with canary", {"error": err, "stopped_s": stopped(doc), "steps": steps(doc)})
    doc, ms, err = guest("suspend", p.pid, "--detach")
    fact("suspend", {"error": err, "stopped_s": stopped(doc), "steps": steps(doc), "nodes": nodes(p.pid), "smi": smi()})
    doc, ms, err = guest("resume", p.pid)
    fact("resume", {"error": err, "stopped_s": stopped(doc), "steps": steps(doc), "nodes": nodes(p.pid), "smi": smi()})
    for word in ("lock", "checkpoint", "restore", "unlock"):  # one failure after each step, undone
        _, _, err = guest("rehearse", p.pid, "--canary=false", "--fail-at", word, env={"GPUCTL_FAULTS": "1"})
        fact("undo after " + word, err[:200])
    tid = [t for t in os.listdir(f"/proc/{p.pid}/task") if int(t) != p.pid]
    if tid:
        fact("thread id, driver", guest_call("state", int(tid[0])))
        fact("thread id, adopt", guest("adopt", int(tid[0]))[2])
    fact("no cuda, driver", guest_call("state", os.getpid()))
    fact("no cuda, adopt", guest("adopt", os.getpid())[2][:300])
    fact("gone, adopt", guest("adopt", 4194000)[2][:300])
    fact("cudaloop end", p.stop())


def guest_call(op, pid):
    r = subprocess.run([GUEST, "driver", op, "--pid", str(pid), "--deadline", "20s"], capture_output=True, text=True)
    return (r.stdout + r.stderr).strip().splitlines()[-1:]


def part_training():
    width, n = str(opt.width), "120"
    p = Program(sys.executable, os.path.join(HERE, "train.py"), width, "8", n)
    want = p.wait(r"^end (\S+) (\S+) (\S+)", 200)
    if not want:
        fact("training", p.lines[-5:])
        return
    base = [float(m.group(1)) for line in p.lines if (m := re.match(r"step \d+ ([\d.]+)", line))][10:]
    p.p.wait()
    p = Program(sys.executable, os.path.join(HERE, "train.py"), width, "8", n)
    p.wait(r"^step 20 ", 100)
    _, adopt, err = guest("adopt", p.pid)
    p.wait(r"^step 60 ", 100)
    doc, _, err2 = guest("suspend", p.pid)
    mem = smi()
    rss = [line for line in open(f"/proc/{p.pid}/status") if line.startswith(("VmRSS", "VmLck", "VmPin"))]
    at = len(p.lines)
    time.sleep(1)
    still = len(p.lines) == at
    doc2, _, err3 = guest("resume", p.pid)
    got = p.wait(r"^end (\S+) (\S+) (\S+)", 200)
    times = [float(m.group(1)) for line in p.lines if (m := re.match(r"step \d+ ([\d.]+)", line))]
    fact("training", {
        "memory": want.group(3), "undisturbed": want.group(1), "suspended_and_resumed": got and got.group(1), "bit_equal": bool(got) and got.group(1) == want.group(1),
        "adopt_ms": adopt, "errors": [err, err2, err3], "suspend_s": stopped(doc), "suspend_steps": steps(doc), "resume_s": stopped(doc2), "resume_steps": steps(doc2),
        "smi_while_suspended": mem, "stands_still": still, "rss": rss,
        "step_median_undisturbed": statistics.median(base), "step_median_adopted": statistics.median(times[25:58]), "before_adoption": statistics.median(times[8:20]),
        "step_ratio": round(statistics.median(times[25:58]) / statistics.median(base), 4), "after_resume": statistics.median(times[65:]),
    })


def part_compare():
    p = Program(sys.executable, os.path.join(HERE, "train.py"), str(opt.width), "8", "100000")
    p.wait(r"^step 5 ", 100)
    compare("training, driver alone and ours", p.pid, 3)
    p.kill()


def part_big():
    p = Program(LOOP, "--mib", str(opt.big))
    if not p.pid:
        return
    compare(f"{opt.big} MiB, driver alone and ours", p.pid, 2)
    path = "/sys/kernel/mm/transparent_hugepage/enabled"
    old = re.search(r"\[(\w+)\]", open(path).read()).group(1)
    other = "always" if old != "always" else "never"
    try:
        open(path, "w").write(other)
        compare(f"{opt.big} MiB, huge pages {other} (were {old})", p.pid, 1)
    except OSError as e:
        fact("huge pages", str(e))
    finally:
        open(path, "w").write(old)
    fact("big end", p.stop())


def part_parallel():
    each = str(opt.big // 2)
    p = Program("sh", "-c", f"echo ready $$; exec {LOOP} --workers 2 --mib {each}")
    end = time.time() + 60
    while time.time() < end and len([line for line in p.lines if line.startswith("ready")]) < 3:
        time.sleep(0.2)
    for n in ("1", "2"):
        doc, _, err = guest("rehearse", p.pid, "--canary=false", "--parallel", n)
        fact(f"two processes of {each} MiB, {n} at once", {"error": err, "stopped_s": stopped(doc), "steps": steps(doc)})
    fact("parallel end", p.stop())


def part_rights():
    p = Program(LOOP, "--mib", "64", user=65534)
    if p.pid:
        doc, _, err = guest("rehearse", p.pid, "--canary=false")
        fact("another user's process", {"error": err, "steps": steps(doc), "nodes": nodes(p.pid)})
        ask = "import ctypes,sys; cu=ctypes.CDLL('libcuda.so.1'); s=ctypes.c_int(-1); print(cu.cuCheckpointProcessGetState(int(sys.argv[1]), ctypes.byref(s)), s.value)"
        for caps in ("sys_ptrace", "sys_ptrace,+dac_override", "sys_ptrace,+dac_read_search", "sys_ptrace,+kill", "sys_ptrace,+sys_admin", "all"):
            sets = [] if caps == "all" else ["setpriv", "--inh-caps=-all", "--bounding-set=-all,+" + caps]
            r = subprocess.run(sets + [sys.executable, "-c", ask, str(p.pid)], capture_output=True, text=True, timeout=30)
            fact("another user's process, state as root with " + caps, (r.stdout + r.stderr[-200:]).strip())
        fact("another user's end", p.stop())
    p = Program(LOOP, "--mib", "64", "--fork")
    if p.pid:
        doc, _, err = guest("suspend", p.pid, "--canary=false", "--detach")
        fact("forked child, to detach", err[:300])
        doc, _, err = guest("suspend", p.pid, "--canary=false")
        fact("forked child, suspend", {"error": err, "parent": nodes(p.pid), "smi": smi()})
        _, _, err = guest("resume", p.pid, "--canary=false")
        fact("forked child end", [err, p.stop()])


def part_managed():
    p = Program(LOOP, "--words", "65536", "--managed")
    if not p.pid:
        return
    doc, _, err = guest("rehearse", p.pid, "--canary=false")
    fact("managed memory", {"error": err, "steps": steps(doc), "state": guest_call("state", p.pid), "end": p.stop(20)})


def part_opencl():
    import glob
    libs = glob.glob("/usr/local/nvidia/lib64/libnvidia-opencl.so.1") + glob.glob("/usr/lib/x86_64-linux-gnu/libnvidia-opencl.so.1")
    stream = next((f for f in (ROOT + "/bin/stream", ROOT + "/test/cl/bin/stream") if os.path.exists(f)), None)
    if not libs or not stream:
        fact("opencl", f"library {libs}, program {stream}")
        return
    env = {"LD_LIBRARY_PATH": ROOT + "/bin:" + os.environ.get("LD_LIBRARY_PATH", ""), "OCL_ICD_FILENAMES": libs[0], "OCL_ICD_VENDORS": libs[0]}
    p = Program("sh", "-c", f"echo ready $$; exec {stream} --stdin --mib 64 --verbose", env=env)
    time.sleep(4)
    state = guest_call("state", p.pid)
    doc, _, err = guest("rehearse", p.pid, "--canary=false")
    fact("an OpenCL process of NVIDIA's platform", {"state": state, "rehearse": err[:300], "steps": steps(doc), "nodes": nodes(p.pid), "lines": p.lines[-2:]})
    if not err:
        doc, _, err = guest("suspend", p.pid, "--canary=false")
        fact("opencl suspended", {"error": err, "nodes": nodes(p.pid), "smi": smi()})
        doc, _, err = guest("resume", p.pid, "--canary=false")
    time.sleep(1)
    end = p.stop(60)
    m = re.match(r"checksum (\d+) (\S+)", end)
    want = ""
    if m:
        r = subprocess.run([stream, "--iterations", m.group(1), "--mib", "64"], capture_output=True, text=True, timeout=90, env={**os.environ, **env})
        want = (r.stdout.strip().splitlines() or [r.stderr[-200:]])[-1]
    fact("opencl end", {"resume": err[:300], "got": end, "undisturbed": want, "equal": bool(m) and want == end})


def part_canary():
    gpus = uuids()
    p = Program(LOOP, "--mib", "256")
    if not p.pid:
        return
    moves = []
    for n in range(6):
        doc, _, err = guest("swap", p.pid, "--gpu", gpus[(n + 1) % 2 % len(gpus)])
        moves.append([err[-300:], stopped(doc), steps(doc)])
    fact("six moves with a canary", moves)
    fact("six moves end", p.stop())


def part_both():
    env = {"LD_LIBRARY_PATH": ROOT + "/bin:" + os.environ.get("LD_LIBRARY_PATH", "")}
    p = Program(sys.executable, os.path.join(HERE, "others.py"), "both", env=env)
    if not p.pid:
        fact("CUDA and OpenCL in one process", p.lines[-3:])
        return
    doc, _, err = guest("rehearse", p.pid, "--canary=false")
    fact("CUDA and OpenCL in one process", {"error": err[-400:], "steps": steps(doc), "nodes": nodes(p.pid), "result": p.stop(40)})


def part_programs():
    for kind in ("inference", "graph", "pinned", "cupy", "jax", "loader", "ipc"):
        if left() < 45:
            fact("programs", "out of time before " + kind)
            return
        p = Program(sys.executable, os.path.join(HERE, "others.py"), kind)
        if not p.pid:
            fact("program " + kind, p.lines[-3:])
            continue
        time.sleep(0.5)
        doc, _, err = guest("suspend", p.pid, "--canary=false")
        doc2, _, err2 = guest("resume", p.pid, "--canary=false") if not err else ({}, 0, "")
        time.sleep(0.5)
        fact("program " + kind, {"suspend": err[:300], "resume": err2[:300], "suspend_s": stopped(doc), "resume_s": stopped(doc2), "result": p.stop(40)})


def part_hashcat():
    """A program that nobody here wrote, with the CUDA backend: it must find a word."""
    if not shutil.which("hashcat"):
        fact("hashcat", "not installed")
        return
    word = "qzjxkvwm7"
    digest = hashlib.sha256(word.encode()).hexdigest()
    # Without NVML, which would keep a node of the driver open, and without OpenCL.
    # Half a minute of an H100: its letters are rare, and come late.
    run = f"echo ready $$; exec hashcat -a 3 -m 1400 -w 3 --potfile-disable --hwmon-disable --backend-ignore-opencl --status --status-timer 1 -1 abcdefgq {digest} '?1?l?l?l?l?l?l?l?d' </dev/null"
    p = Program("sh", "-c", run)
    p.wait(r"Running|Speed", 120)
    time.sleep(3)
    gpus = uuids()
    doc, _, err = guest("suspend", p.pid, "--canary=false")
    held = nodes(p.pid)
    doc2, _, err2 = guest("resume", p.pid, "--canary=false", *(["--gpu", gpus[1]] if len(gpus) > 1 else [])) if not err else ({}, 0, "")
    found = p.wait(rf"^{digest}:(\S+)", max(30, min(240, left() - 20)))
    fact("hashcat", {"suspend": err[:300], "resume": err2[:300], "suspend_s": stopped(doc), "resume_s": stopped(doc2), "nodes_suspended": held,
                     "found": found and found.group(1), "right": bool(found) and found.group(1) == word and not err and not err2, "last": p.lines[-4:]})
    p.kill()


def part_llama():
    """llama.cpp, suspended and resumed while it generates: tokens and logits must be those of the undisturbed run, bit for bit."""
    folder = os.path.join(ROOT, "programs/llama")
    if not os.path.isdir(folder):
        fact("llama.cpp", "programs/llama is not there")
        return
    model = os.path.join(tempfile.gettempdir(), "random.gguf")
    subprocess.run([sys.executable, os.path.join(HERE, "llama.py"), "make", model], check=True)
    run = (sys.executable, os.path.join(HERE, "llama.py"), "run", folder, model, "4000")
    results, facts = [], {}
    for disturbed in (False, True):
        p = Program(*run)
        if not p.pid or not p.wait(r"^at 500 ", 120):
            fact("llama.cpp", p.lines[-6:])
            return
        if disturbed:
            facts["memory"] = subprocess.run(["nvidia-smi", "--query-compute-apps=pid,used_memory", "--format=csv,noheader"], capture_output=True, text=True).stdout.strip()
            doc, _, err = guest("suspend", p.pid, "--canary=false")
            held = nodes(p.pid)
            doc2, _, err2 = guest("resume", p.pid, "--canary=false") if not err else ({}, 0, "")
            at = [line for line in p.lines if line.startswith("at ")][-1]
            facts.update({"suspend": err[:300], "resume": err2[:300], "suspend_s": stopped(doc), "resume_s": stopped(doc2), "nodes_suspended": held, "suspended": at})
        m = p.wait(r"^result (\w+)", min(120, left()))
        results.append(m and m.group(1))
        p.kill()
    facts["right"] = results[0] is not None and results[0] == results[1] and not facts["suspend"] and not facts["resume"]
    fact("llama.cpp", {**facts, "results": results})


def part_folder():
    """A process goes to a folder and comes back; criu of the path."""
    if not shutil.which("criu"):
        fact("folder", "no criu")
        return
    base = tempfile.mkdtemp()
    fifo, out, disk = base + "/in", base + "/out", base + "/disk"
    os.mkfifo(fifo)
    hold = os.open(fifo, os.O_RDWR)
    with open(out, "w") as f:
        p = subprocess.Popen(["setsid", "-w", LOOP, "--mib", "1024", "--say", "100"], stdin=hold, stdout=f, stderr=f, close_fds=True)

    def says(what, seconds):
        end = time.time() + seconds
        while time.time() < end:
            m = re.search(what, open(out).read(), re.M)
            if m:
                return m
            time.sleep(0.1)
        return None

    m = says(r"^ready (\d+)", 60)
    if not m:
        fact("folder", open(out).read()[-300:])
        return
    pid = int(m.group(1))
    doc, ms, err = guest("suspend", pid, "--to", disk, "--canary=false")
    p.wait(60)
    size = sum(os.path.getsize(os.path.join(disk, n)) for n in os.listdir(disk)) if os.path.isdir(disk) else 0
    doc2, ms2, err2 = guest("resume", 0, "--from", disk, "--canary=false") if not err else ({}, 0, "")
    before = re.findall(r"^round (\d+)", open(out).read(), re.M)
    if not err2:
        says(rf"^round {int(before[-1]) + 200 if before else 200}$", 30)
    os.write(hold, b"stop\n")
    end = says(r"^(ok|bad) .*", 60)
    fact("folder", {"suspend": err[:600], "resume": err2[:600], "suspend_ms": ms, "resume_ms": ms2, "bytes": size, "steps": steps(doc), "steps_resume": steps(doc2),
                    "result": end and end.group(0)})


def uuids():
    r = subprocess.run(["nvidia-smi", "--query-gpu=uuid", "--format=csv,noheader"], capture_output=True, text=True)
    return r.stdout.split()


def part_two():
    gpus = uuids()
    if len(gpus) < 2:
        fact("two GPUs", "one only")
        return
    width, n = str(opt.width), "160"
    p = Program(sys.executable, os.path.join(HERE, "train.py"), width, "8", n)
    want = p.wait(r"^end (\S+)", 200)
    p.p.wait()
    p = Program(sys.executable, os.path.join(HERE, "train.py"), width, "8", n)
    moves = []
    for at, to in ((30, 1), (70, 0), (110, 1)):
        p.wait(rf"^step {at} ", 100)
        doc, _, err = guest("swap", p.pid, "--gpu", gpus[to])
        moves.append({"to": to, "error": err, "stopped_s": stopped(doc), "steps": steps(doc), "nodes": nodes(p.pid)})
        if err:
            break
    got = p.wait(r"^end (\S+)", 200)
    fact("training moved between GPUs", {"moves": moves, "undisturbed": want and want.group(1), "moved": got and got.group(1), "bit_equal": bool(want and got) and want.group(1) == got.group(1)})
    p = Program(sys.executable, os.path.join(HERE, "train.py"), width, "8", "100000")
    p.wait(r"^step 5 ", 100)
    a, o, where = [], [], 0
    for _ in range(3):
        if left() < 60:
            break
        d = alone(p.pid, f"{gpus[where]}={gpus[1-where]}", f"{gpus[1-where]}={gpus[where]}")
        where = 1 - where
        a.append(d)
        doc, _, err = guest("swap", p.pid, "--canary=false", "--gpu", gpus[1 - where])
        where = 1 - where
        o.append({"error": err, "stopped_s": stopped(doc), "steps": steps(doc)})
    if a:
        fact("moved, driver alone and ours", {"alone": a, "ours": o, "ratio_of_medians": round(
            statistics.median(v["stopped_s"] for v in o) / statistics.median(v["total"] for v in a), 4)})
    p.kill()
    p = Program(LOOP, "--mib", "512")
    if p.pid:
        for word in ("checkpoint", "restore"):
            _, _, err = guest("swap", p.pid, "--canary=false", "--gpu", gpus[1], "--fail-at", word, env={"GPUCTL_FAULTS": "1"})
            fact("swap undone after " + word, [err[:200], nodes(p.pid)])
        fact("loop end", p.stop())


PARTS = ["machine", "basic", "training", "compare", "two", "canary", "rights", "opencl", "both", "big", "parallel", "programs", "hashcat", "llama", "folder", "managed"]
for name in opt.parts.split(",") if opt.parts else PARTS:
    if left() < 30:
        fact("left out", name)
        continue
    say("==", name)
    try:
        globals()["part_" + name]()
    except Exception as e:  # the next part may go on
        import traceback

        fact("part " + name + " failed", traceback.format_exc()[-600:])
        for p in [q for q in globals().values() if isinstance(q, Program)]:
            p.kill()
say("done", json.dumps(list(FACTS)))
