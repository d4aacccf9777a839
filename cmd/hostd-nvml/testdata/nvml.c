// A library with the few functions of NVML that hostd-nvml cannot do without,
// for tests: two GPUs, and the ways in which drivers go wrong. What it does is
// in the file that GPUCTL_TEST_MODE names.
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct { int index; } *device;
typedef struct {
  char legacy[16];
  unsigned domain, bus, device, id, subsystem;
  char bus_id[32];
} pci_info;
typedef struct { unsigned long long total, free, used; } memory;
typedef struct { unsigned pid; unsigned long long used; unsigned gi, ci; } process;
typedef struct { device dev; unsigned long long type, data; unsigned gi, ci; } event;

enum { SUCCESS = 0, NOT_SUPPORTED = 3, NOT_FOUND = 6, NOT_LOADED = 9, TIMEOUT = 10, LOST = 15, MISMATCH = 18 };

static struct { int index; } gpus[2] = {{0}, {1}};
static int events;

static int mode(const char *want) {
  char text[32] = "";
  const char *path = getenv("GPUCTL_TEST_MODE");
  FILE *f = path ? fopen(path, "r") : NULL;
  if (f) {
    if (!fgets(text, sizeof text, f)) text[0] = 0;
    fclose(f);
  }
  return !strcmp(text, want);
}

int nvmlInit_v2(void) {
  puts("a library that prints to standard output");
  fflush(stdout);
  if (mode("unloaded")) return NOT_LOADED;
  if (mode("mismatch")) return MISMATCH;
  return SUCCESS;
}
int nvmlShutdown(void) {
  if (mode("stay")) sleep(1000);
  return SUCCESS;
}
const char *nvmlErrorString(int r) {
  switch (r) {
    case MISMATCH: return "Driver/library version mismatch";
    case LOST: return "GPU is lost";
    default: return "some error";
  }
}
int nvmlSystemGetDriverVersion(char *s, unsigned n) { return snprintf(s, n, "550.54.15"), SUCCESS; }
int nvmlSystemGetCudaDriverVersion(int *v) { return *v = 12040, SUCCESS; }
int nvmlSystemGetProcessName(unsigned pid, char *s, unsigned n) { return snprintf(s, n, "train\n%u", pid), SUCCESS; }
int nvmlDeviceGetCount_v2(unsigned *n) {
  if (mode("abort")) abort();
  if (mode("segv")) *(volatile int *)8 = 1;
  if (mode("hang")) for (;;) sleep(1000);
  *n = 2;
  return SUCCESS;
}
int nvmlDeviceGetHandleByIndex_v2(unsigned i, device *d) {
  if (i == 1 && mode("lost")) return LOST;
  return *d = (device)&gpus[i], SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(device d, pci_info *p) {
  memset(p, 0, sizeof *p);
  snprintf(p->bus_id, sizeof p->bus_id, "00000000:%02X:00.0", 0xc1 + d->index);
  return SUCCESS;
}
int nvmlDeviceGetUUID(device d, char *s, unsigned n) { return snprintf(s, n, "GPU-%d", d->index), SUCCESS; }
int nvmlDeviceGetName(device d, char *s, unsigned n) { return snprintf(s, n, "NVIDIA Test"), SUCCESS; }
int nvmlDeviceGetMemoryInfo(device d, memory *m) {
  if (d->index == 1 && mode("lost")) return LOST;
  m->total = 1000, m->used = 10, m->free = 990;
  return SUCCESS;
}
int nvmlDeviceGetTemperature(device d, int sensor, unsigned *t) { return *t = 40, SUCCESS; }
int nvmlDeviceGetPowerUsage(device d, unsigned *mw) { return NOT_SUPPORTED; }
int nvmlDeviceGetComputeRunningProcesses_v3(device d, unsigned *n, process *p) {
  if (d->index == 1) return *n = 0, SUCCESS;
  if (*n < 2) return *n = 2, 7;
  p[0] = (process){100, 5, -1, -1};
  p[1] = (process){101, -1, -1, -1};
  *n = 2;
  return SUCCESS;
}
int nvmlEventSetCreate(void **set) { return *set = &events, SUCCESS; }
int nvmlEventSetFree(void *set) { return SUCCESS; }
int nvmlDeviceRegisterEvents(device d, unsigned long long types, void *set) { return SUCCESS; }
int nvmlEventSetWait_v2(void *set, event *e, unsigned ms) {
  static const int codes[] = {13, 79, 79};
  if (!mode("xid") || events == 3) return TIMEOUT;
  *e = (event){(device)&gpus[0], 8, codes[events++], -1, -1};
  return SUCCESS;
}
