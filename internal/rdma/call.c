#define _GNU_SOURCE
#include "call.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>

int gxRdmaOpen(const char *path, const char *prefix, gxRsockets *out, char *why, size_t len) {
	void *lib = dlopen(path, RTLD_NOW | RTLD_LOCAL);
	if (!lib) {
		const char *e = dlerror(); // of this thread: so it is read here
		snprintf(why, len, "%s", e ? e : "cannot be loaded");
		return -1;
	}
	const struct {
		const char *name;
		void **to;
	} all[] = {
	    {"socket", (void **)&out->socket},	       {"bind", (void **)&out->bind},
	    {"listen", (void **)&out->listen},	       {"accept", (void **)&out->accept},
	    {"connect", (void **)&out->connect},       {"recv", (void **)&out->recv},
	    {"send", (void **)&out->send},	       {"poll", (void **)&out->poll},
	    {"shutdown", (void **)&out->shutdown},
	    {"close", (void **)&out->close},	       {"fcntl", (void **)&out->fcntl},
	    {"setsockopt", (void **)&out->setsockopt}, {"getsockname", (void **)&out->getsockname},
	    {"getpeername", (void **)&out->getpeername},
	};
	for (size_t i = 0; i < sizeof(all) / sizeof(all[0]); i++) {
		char name[64];
		snprintf(name, sizeof(name), "%s%s", prefix, all[i].name);
		*all[i].to = dlsym(lib, name);
		if (!*all[i].to) {
			snprintf(why, len, "%s has no %s", path, name);
			dlclose(lib);
			return -1;
		}
	}
	return 0; // it stays loaded until the process ends
}

#define RESULT(n) ({ __typeof__(n) r_ = (n); r_ < 0 ? -(__typeof__(r_))errno : r_; })

int gxRdmaSocket(const gxRsockets *l, int family) { return RESULT(l->socket(family, SOCK_STREAM, 0)); }

int gxRdmaBind(const gxRsockets *l, int s, const void *addr, socklen_t len) { return RESULT(l->bind(s, addr, len)); }

int gxRdmaListen(const gxRsockets *l, int s, int backlog) { return RESULT(l->listen(s, backlog)); }

int gxRdmaAccept(const gxRsockets *l, int s) { return RESULT(l->accept(s, NULL, NULL)); }

int gxRdmaConnect(const gxRsockets *l, int s, const void *addr, socklen_t len) { return RESULT(l->connect(s, addr, len)); }

ssize_t gxRdmaRecv(const gxRsockets *l, int s, void *to, size_t n) { return RESULT(l->recv(s, to, n, 0)); }

ssize_t gxRdmaSend(const gxRsockets *l, int s, const void *from, size_t n) { return RESULT(l->send(s, from, n, MSG_NOSIGNAL)); }

int gxRdmaPoll(const gxRsockets *l, gxPollFd *fds, int n) { return RESULT(l->poll(fds, (nfds_t)n, -1)); }

int gxRdmaShutdown(const gxRsockets *l, int s) { return RESULT(l->shutdown(s, SHUT_RDWR)); }

int gxRdmaClose(const gxRsockets *l, int s) { return RESULT(l->close(s)); }

int gxRdmaBlock(const gxRsockets *l, int s, int blocks) { return RESULT(l->fcntl(s, F_SETFL, blocks ? 0 : O_NONBLOCK)); }

int gxRdmaSet(const gxRsockets *l, int s, int level, int name, int value) {
	return RESULT(l->setsockopt(s, level, name, &value, sizeof(value)));
}

int gxRdmaName(const gxRsockets *l, int s, int peer, void *addr, socklen_t *len) {
	return RESULT((peer ? l->getpeername : l->getsockname)(s, addr, len));
}
