// What the two libraries of the fake share: its configuration, the cards, and who has how
// much of their memory. All of it is in the folder that GPUCTL_FAKE_CUDA names:
//
//	config           the switches, read anew at each call (see README.md)
//	dev/nvidiaN      a node of a card; its content is the card's memory
//	dev/nvidiactl, dev/nvidia-uvm
//	cards/N          who has which part of the card's memory
//	procs/PID        socket on which a process takes requests
//	violations       what a caller did that the driver forbids
#pragma once
#define _GNU_SOURCE
#include <ctype.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/file.h>
#include <sys/stat.h>
#include <unistd.h>

#define EXPORT __attribute__((visibility("default")))
#define MOST_CARDS 16
#define MOST_PARTS 256

struct card {
	char uuid[48], name[64], address[32];
	unsigned chip;
	uint64_t bytes;
	int mig, mps, transient, exclusive;
};

struct config {
	int cuda, cards, keepfd, nvml_fails;
	char driver[32];
	struct card card[MOST_CARDS];
};

// A part of a card's memory that a process has.
struct part {
	int32_t pid, used;
	uint64_t start, offset, size;
};

static inline const char *fakeDir(void) {
	const char *d = getenv("GPUCTL_FAKE_CUDA");
	return d && *d ? d : NULL;
}

static inline void fakePath(char *out, size_t n, const char *fmt, ...) {
	int used = snprintf(out, n, "%s/", fakeDir());
	va_list ap;
	va_start(ap, fmt);
	vsnprintf(out + used, n - used, fmt, ap);
	va_end(ap);
}

static inline int fakeConfig(struct config *c) {
	memset(c, 0, sizeof *c);
	if (!fakeDir())
		return -1;
	char path[512], line[512];
	fakePath(path, sizeof path, "config");
	FILE *f = fopen(path, "re");
	if (!f)
		return -1;
	c->cuda = 13000;
	snprintf(c->driver, sizeof c->driver, "580.159.04");
	while (fgets(line, sizeof line, f)) {
		char *save, *key = strtok_r(line, " \n", &save);
		if (!key)
			continue;
		char *arg = strtok_r(NULL, " \n", &save);
		if (!strcmp(key, "cuda") && arg)
			c->cuda = atoi(arg);
		else if (!strcmp(key, "driver") && arg)
			snprintf(c->driver, sizeof c->driver, "%s", arg);
		else if (!strcmp(key, "keepfd"))
			c->keepfd = 1;
		else if (!strcmp(key, "nvml-fails"))
			c->nvml_fails = 1;
		else if (!strcmp(key, "gpu") && arg && c->cards < MOST_CARDS) {
			struct card *k = &c->card[c->cards++];
			snprintf(k->uuid, sizeof k->uuid, "%s", arg);
			char *chip = strtok_r(NULL, " \n", &save), *address = strtok_r(NULL, " \n", &save), *mib = strtok_r(NULL, " \n", &save);
			k->chip = chip ? strtoul(chip, NULL, 16) : 0;
			snprintf(k->address, sizeof k->address, "%s", address ? address : "");
			k->bytes = mib ? strtoull(mib, NULL, 10) << 20 : 0;
			snprintf(k->name, sizeof k->name, "NVIDIA Fake %08X", k->chip);
			for (char *w; (w = strtok_r(NULL, " \n", &save));) {
				k->mig |= !strcmp(w, "mig");
				k->mps |= !strcmp(w, "mps");
				k->transient |= !strcmp(w, "transient");
				k->exclusive |= !strcmp(w, "exclusive");
			}
		}
	}
	fclose(f);
	return 0;
}

// fakeSwitch looks for a line "KEY OP [PID|-] [NUMBER] [WORD]" and reports whether it is there.
static inline int fakeSwitch(const char *key, const char *op, int pid, int *number, char *word, size_t n) {
	char path[512], line[512];
	fakePath(path, sizeof path, "config");
	FILE *f = fopen(path, "re");
	int found = 0;
	while (f && !found && fgets(line, sizeof line, f)) {
		char k[32] = "", o[32] = "", p[32] = "-", v[32] = "0", w[32] = "";
		if (sscanf(line, "%31s %31s %31s %31s %31s", k, o, p, v, w) < 2 || strcmp(k, key) || strcmp(o, op))
			continue;
		if (strcmp(p, "-") && atoi(p) != pid)
			continue;
		found = 1;
		if (number)
			*number = atoi(v);
		if (word)
			snprintf(word, n, "%s", w);
	}
	if (f)
		fclose(f);
	return found;
}

// fakeOnce reports whether the file NAME was there, and takes it away.
static inline int fakeOnce(const char *fmt, const char *a, const char *b) {
	char path[512];
	fakePath(path, sizeof path, fmt, a, b);
	return unlink(path) == 0;
}

static inline void fakeViolation(const char *fmt, ...) {
	char path[512], text[512];
	va_list ap;
	va_start(ap, fmt);
	int n = vsnprintf(text, sizeof text - 2, fmt, ap);
	va_end(ap);
	text[n++] = '\n';
	fakePath(path, sizeof path, "violations");
	int fd = open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0666);
	if (fd >= 0) {
		if (write(fd, text, n) < 0)
			perror("violations");
		close(fd);
	}
}

static inline uint64_t fakeStart(int pid) {
	char path[64], buf[1024];
	snprintf(path, sizeof path, "/proc/%d/stat", pid);
	int fd = open(path, O_RDONLY | O_CLOEXEC);
	if (fd < 0)
		return 0;
	ssize_t n = read(fd, buf, sizeof buf - 1);
	close(fd);
	if (n <= 0)
		return 0;
	buf[n] = 0;
	char *p = strrchr(buf, ')');
	if (!p || p[2] == 'Z' || p[2] == 'X')
		return 0;
	p += 2;
	for (int field = 3; field < 22; field++) {
		if (!(p = strchr(p, ' ')))
			return 0;
		p++;
	}
	return strtoull(p, NULL, 10);
}

// fakeParts opens a card's list, locked. Parts of processes that have ended are freed.
static inline int fakeParts(int card, struct part parts[MOST_PARTS]) {
	char path[512];
	fakePath(path, sizeof path, "cards/%d", card);
	int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666);
	if (fd < 0 || flock(fd, LOCK_EX))
		return -1;
	fchmod(fd, 0666); // users share it; only its owner can do this
	memset(parts, 0, sizeof(struct part) * MOST_PARTS);
	if (pread(fd, parts, sizeof(struct part) * MOST_PARTS, 0) < 0)
		return -1;
	for (int i = 0; i < MOST_PARTS; i++)
		// Not by its start: a process that criu has made again is in a time namespace, and
		// sees another one than those outside.
		if (parts[i].used && !fakeStart(parts[i].pid))
			parts[i].used = 0;
	return fd;
}

static inline void fakeSave(int fd, struct part parts[MOST_PARTS]) {
	if (pwrite(fd, parts, sizeof(struct part) * MOST_PARTS, 0) < 0)
		perror("cards");
	close(fd);
}
