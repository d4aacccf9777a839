// fakecard: what NVIDIA's kernel driver does with the card of a VM, for the fake in test/cuda/fake.
// A PCI device of a VM stands for the card, as one that QEMU emulates.
//
//	fakecard VENDOR:DEVICE MIB JOURNAL [ROOT]
//
// GPUCTL_FAKE_CUDA names the fake's folder, ROOT is the VM's (default /). The device is looked for
// every 500 ms. While it is there and not released, by gpuguest's JOURNAL, the fake has a GPU at its address,
// each time with another UUID and with empty memory, as it may be another card; the switches in
// the file plug-N are those of the Nth. A card that goes while a process has memory on it is noted
// in violations: NVIDIA's driver would wait for ever.
#include "fake/fake.h"

#include <dirent.h>

static char root[256] = "";
static const char *journal;

// word reads the first word of a file of a PCI device.
static int word(const char *device, const char *name, char *out, size_t n) {
	char path[768];
	snprintf(path, sizeof path, "%s/sys/bus/pci/devices/%s/%s", root, device, name);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return -1;
	ssize_t got = read(fd, out, n - 1);
	close(fd);
	if (got < 0)
		return -1;
	out[got] = 0;
	out[strcspn(out, " \n")] = 0;
	return 0;
}

// released reports whether gpuguest has released the device at an address: then it is in the
// journal, from before its driver is unbound until one is bound again.
static int released(const char *address) {
	static char text[1 << 16];
	int fd = open(journal, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, text, sizeof text - 1);
	close(fd);
	text[n > 0 ? n : 0] = 0;
	return strstr(text, address) != NULL;
}

// find looks for the device; it is as good as gone while it is released.
static int find(unsigned vendor, unsigned device, char *address, size_t n) {
	char path[512], text[64];
	snprintf(path, sizeof path, "%s/sys/bus/pci/devices", root);
	DIR *d = opendir(path);
	int found = 0;
	for (struct dirent *e; d && !found && (e = readdir(d));) {
		if (e->d_name[0] == '.' || word(e->d_name, "device", text, sizeof text) || strtoul(text, NULL, 16) != device)
			continue;
		if (word(e->d_name, "vendor", text, sizeof text) || strtoul(text, NULL, 16) != vendor)
			continue;
		if (released(e->d_name))
			continue;
		found = 1;
		snprintf(address, n, "%s", e->d_name);
	}
	if (d)
		closedir(d);
	return found;
}

// configure writes the fake's configuration, with a line for the card if there is one.
static int configure(const char *gpu) {
	char path[512], tmp[520];
	fakePath(path, sizeof path, "config");
	snprintf(tmp, sizeof tmp, "%s.tmp", path);
	FILE *f = fopen(tmp, "we");
	if (!f)
		return -1;
	fprintf(f, "cuda 13000\ndriver 580.159.04\n%s", gpu);
	return fclose(f) || rename(tmp, path);
}

static void gone(void) {
	char path[512];
	struct part parts[MOST_PARTS];
	if (configure(""))
		perror("config");
	int fd = fakeParts(0, parts);
	for (int i = 0; fd >= 0 && i < MOST_PARTS; i++)
		if (parts[i].used) {
			fakeViolation("the card goes, and process %d has memory on it", parts[i].pid);
			parts[i].used = 0;
		}
	if (fd >= 0)
		fakeSave(fd, parts);
	fakePath(path, sizeof path, "cards/0");
	unlink(path);
	fakePath(path, sizeof path, "dev/nvidia0");
	unlink(path);
	printf("gone\n");
}

static int came(unsigned vendor, unsigned device, unsigned mib, const char *address) {
	static unsigned plugged;
	char path[512], line[1024];
	fakePath(path, sizeof path, "dev/nvidia0");
	int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0666);
	if (fd < 0)
		return -1;
	fchmod(fd, 0666);
	if (ftruncate(fd, (off_t)mib << 20))
		perror(path);
	close(fd);
	// The fake takes the first two bytes of a UUID for the chip.
	int n = snprintf(line, sizeof line, "gpu GPU-%04x0000-0000-4000-8000-%012x %04x%04x %s %u\n", device, ++plugged, device, vendor, address, mib);
	printf("%s", line);
	fakePath(path, sizeof path, "plug-%u", plugged);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	ssize_t more = fd < 0 ? 0 : read(fd, line + n, sizeof line - 1 - n);
	if (fd >= 0)
		close(fd);
	line[n + (more > 0 ? more : 0)] = 0;
	if (configure(line))
		return -1;
	return 0;
}

int main(int argc, char **argv) {
	unsigned vendor, device, mib = argc > 2 ? strtoul(argv[2], NULL, 10) : 0;
	if (argc < 4 || argc > 5 || sscanf(argv[1], "%x:%x", &vendor, &device) != 2 || !mib || !fakeDir()) {
		fprintf(stderr, "usage: GPUCTL_FAKE_CUDA=DIR fakecard VENDOR:DEVICE MIB JOURNAL [ROOT]\n");
		return 2;
	}
	journal = argv[3];
	if (argc > 4)
		snprintf(root, sizeof root, "%s", argv[4]);
	setvbuf(stdout, NULL, _IOLBF, 0);
	umask(0);
	static const char *const dirs[] = {"", "dev", "cards", "procs"};
	for (size_t i = 0; i < sizeof dirs / sizeof *dirs; i++) {
		char path[512];
		fakePath(path, sizeof path, "%s", dirs[i]);
		mkdir(path, 0777);
	}
	static const char *const nodes[] = {"dev/nvidiactl", "dev/nvidia-uvm"};
	for (size_t i = 0; i < sizeof nodes / sizeof *nodes; i++) {
		char path[512];
		fakePath(path, sizeof path, "%s", nodes[i]);
		close(open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666));
	}
	if (configure("")) {
		perror("fakecard");
		return 1;
	}
	for (char before[64] = "", now[64];; usleep(500 * 1000)) {
		if (!find(vendor, device, now, sizeof now))
			now[0] = 0;
		if (!strcmp(before, now))
			continue;
		if (before[0])
			gone();
		if (now[0] && came(vendor, device, mib, now)) {
			perror("fakecard");
			return 1;
		}
		snprintf(before, sizeof before, "%s", now);
	}
}
