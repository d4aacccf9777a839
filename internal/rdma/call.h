// The functions of rsockets, found by name in a library. Each call returns what the
// library's function does, or -errno.
#ifndef GPUCTL_RDMA_CALL_H
#define GPUCTL_RDMA_CALL_H

#include <poll.h>
#include <stddef.h>
#include <sys/socket.h>
#include <sys/types.h>

typedef struct {
	int (*socket)(int, int, int);
	int (*bind)(int, const struct sockaddr *, socklen_t);
	int (*listen)(int, int);
	int (*accept)(int, struct sockaddr *, socklen_t *);
	int (*connect)(int, const struct sockaddr *, socklen_t);
	ssize_t (*recv)(int, void *, size_t, int);
	ssize_t (*send)(int, const void *, size_t, int);
	int (*poll)(struct pollfd *, nfds_t, int);
	int (*shutdown)(int, int);
	int (*close)(int);
	int (*fcntl)(int, int, ...);
	int (*setsockopt)(int, int, int, const void *, socklen_t);
	int (*getsockname)(int, struct sockaddr *, socklen_t *);
	int (*getpeername)(int, struct sockaddr *, socklen_t *);
} gxRsockets;

typedef struct pollfd gxPollFd;

// gxRdmaOpen loads a library whose functions have names that begin with prefix. It returns 0,
// or -1 and why.
int gxRdmaOpen(const char *path, const char *prefix, gxRsockets *out, char *why, size_t len);

int gxRdmaSocket(const gxRsockets *l, int family);
int gxRdmaBind(const gxRsockets *l, int s, const void *addr, socklen_t len);
int gxRdmaListen(const gxRsockets *l, int s, int backlog);
int gxRdmaAccept(const gxRsockets *l, int s);
int gxRdmaConnect(const gxRsockets *l, int s, const void *addr, socklen_t len);
ssize_t gxRdmaRecv(const gxRsockets *l, int s, void *to, size_t n);
ssize_t gxRdmaSend(const gxRsockets *l, int s, const void *from, size_t n);
// gxRdmaPoll waits for one of several sockets, or other descriptors.
int gxRdmaPoll(const gxRsockets *l, gxPollFd *fds, int n);
int gxRdmaShutdown(const gxRsockets *l, int s);
int gxRdmaClose(const gxRsockets *l, int s);
int gxRdmaBlock(const gxRsockets *l, int s, int blocks);
int gxRdmaSet(const gxRsockets *l, int s, int level, int name, int value);
int gxRdmaName(const gxRsockets *l, int s, int peer, void *addr, socklen_t *len);

#endif
