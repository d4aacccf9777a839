// A libnvidia-ml.so.1 that lists the cards of the fake, and who has memory of them.
#include "fake.h"

#include <limits.h>

enum { OK = 0, UNSUPPORTED = 3, NOTFOUND = 6, SHORT = 7, UNINIT = 1, UNKNOWN = 999 };

static struct config conf;
static int up;

EXPORT int nvmlInit_v2(void) {
	if (fakeConfig(&conf))
		return 9; // NVML_ERROR_DRIVER_NOT_LOADED
	if (conf.nvml_fails)
		return UNKNOWN;
	up = 1;
	return OK;
}

EXPORT int nvmlShutdown(void) {
	up = 0;
	return OK;
}

EXPORT int nvmlSystemGetDriverVersion(char *out, unsigned n) {
	snprintf(out, n, "%s", conf.driver);
	return up ? OK : UNINIT;
}

EXPORT int nvmlDeviceGetCount_v2(unsigned *n) {
	*n = conf.cards;
	return up ? OK : UNINIT;
}

EXPORT int nvmlDeviceGetHandleByIndex_v2(unsigned i, void **dev) {
	if (!up || i >= (unsigned)conf.cards)
		return NOTFOUND;
	*dev = &conf.card[i];
	return OK;
}

static int indexOf(void *dev) { return (int)((struct card *)dev - conf.card); }

EXPORT int nvmlDeviceGetUUID(void *dev, char *out, unsigned n) {
	snprintf(out, n, "%s", ((struct card *)dev)->uuid);
	return OK;
}

EXPORT int nvmlDeviceGetName(void *dev, char *out, unsigned n) {
	snprintf(out, n, "%s", ((struct card *)dev)->name);
	return OK;
}

EXPORT int nvmlDeviceGetMinorNumber(void *dev, unsigned *n) {
	*n = indexOf(dev);
	return OK;
}

struct pciInfo {
	char legacy[16];
	unsigned domain, bus, device, chip, subsystem;
	char address[32];
};

EXPORT int nvmlDeviceGetPciInfo_v3(void *dev, struct pciInfo *p) {
	memset(p, 0, sizeof *p);
	p->chip = ((struct card *)dev)->chip;
	snprintf(p->address, sizeof p->address, "%s", ((struct card *)dev)->address);
	return OK;
}

EXPORT int nvmlDeviceGetMemoryInfo(void *dev, uint64_t out[3]) {
	struct part parts[MOST_PARTS];
	int fd = fakeParts(indexOf(dev), parts);
	if (fd < 0)
		return UNKNOWN;
	uint64_t used = 0;
	for (int i = 0; i < MOST_PARTS; i++)
		used += parts[i].used ? parts[i].size : 0;
	fakeSave(fd, parts);
	out[0] = ((struct card *)dev)->bytes;
	out[1] = out[0] - used;
	out[2] = used;
	return OK;
}

EXPORT int nvmlDeviceGetMigMode(void *dev, unsigned *now, unsigned *pending) {
	*now = *pending = ((struct card *)dev)->mig;
	return OK;
}

EXPORT int nvmlDeviceGetPersistenceMode(void *dev, unsigned *on) {
	*on = !((struct card *)dev)->transient;
	return OK;
}

EXPORT int nvmlDeviceGetComputeMode(void *dev, unsigned *mode) {
	*mode = ((struct card *)dev)->exclusive ? 3 : 0;
	return OK;
}

EXPORT int nvmlDeviceGetVirtualizationMode(void *dev, unsigned *mode) {
	(void)dev;
	*mode = 0;
	return OK;
}

struct process {
	unsigned pid;
	uint64_t used;
	unsigned gpuInstance, computeInstance;
};

static int processes(void *dev, unsigned *count, struct process *out) {
	struct part parts[MOST_PARTS];
	int fd = fakeParts(indexOf(dev), parts);
	if (fd < 0)
		return UNKNOWN;
	unsigned n = 0, room = *count;
	for (int i = 0; i < MOST_PARTS; i++) {
		if (!parts[i].used)
			continue;
		unsigned k = 0;
		while (k < n && k < room && out[k].pid != (unsigned)parts[i].pid)
			k++;
		if (k < room) {
			if (k == n)
				out[k] = (struct process){.pid = parts[i].pid};
			out[k].used += parts[i].size;
		}
		n += k == n;
	}
	// A process that only NVML knows.
	int stray;
	if (fakeSwitch("stray", "process", 0, &stray, NULL, 0) && n < room)
		out[n++] = (struct process){.pid = stray, .used = 1 << 20};
	fakeSave(fd, parts);
	*count = n;
	return n > room ? SHORT : OK;
}

EXPORT int nvmlDeviceGetComputeRunningProcesses_v3(void *dev, unsigned *count, struct process *out) {
	if (((struct card *)dev)->mps) {
		*count = 0;
		return OK;
	}
	return processes(dev, count, out);
}

EXPORT int nvmlDeviceGetMPSComputeRunningProcesses_v3(void *dev, unsigned *count, struct process *out) {
	if (!((struct card *)dev)->mps) {
		*count = 0;
		return OK;
	}
	return processes(dev, count, out);
}
