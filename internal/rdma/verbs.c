#define _GNU_SOURCE
#include "verbs.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <rdma/rdma_cma.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
	ROOM = 64 << 10,    // bytes of one message
	BUFFERS = 16,	    // of each direction
	EXTRA = 4,	    // received messages that only give buffers back: at most two are under way
	POSTED = BUFFERS + EXTRA,
};

struct header {
	uint32_t size;	// bytes that follow
	uint16_t freed; // buffers that the other end may use again
	uint16_t flags; // LAST
};
enum { LAST = 1, SLOT = ROOM + (int)sizeof(struct header) };

struct rxConn {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
	struct ibv_pd *pd;
	struct ibv_comp_channel *comp;
	struct ibv_cq *cq;
	struct ibv_mr *mr;
	char *memory;
	int events;		 // of cq, to be acknowledged
	int credit;		 // messages with bytes that the other end has room for
	int owed;		 // buffers that it is to be told of
	int ready[POSTED], head, tail; // received slots with bytes, in order
	uint32_t sizes[POSTED];	 // of their bytes
	uint32_t at;		 // bytes read of the first
	int idle[BUFFERS + EXTRA], nidle; // send slots
	int last, done, broken;	 // LAST came; was sent; errno
};

struct rxListener {
	struct rdma_event_channel *channel;
	struct rdma_cm_id *id;
};

#define CM(X) X(rdma_create_event_channel) X(rdma_destroy_event_channel) X(rdma_create_id) X(rdma_destroy_id) X(rdma_resolve_addr) \
	X(rdma_resolve_route) X(rdma_create_qp) X(rdma_destroy_qp) X(rdma_connect) X(rdma_bind_addr) X(rdma_listen) X(rdma_get_cm_event) \
	X(rdma_ack_cm_event) X(rdma_accept) X(rdma_disconnect) X(rdma_migrate_id) X(rdma_get_devices) X(rdma_free_devices) X(rdma_set_option)
#define VERBS(X) X(ibv_alloc_pd) X(ibv_dealloc_pd) X(ibv_create_comp_channel) X(ibv_destroy_comp_channel) X(ibv_create_cq) X(ibv_destroy_cq) \
	X(ibv_dereg_mr) X(ibv_get_cq_event) X(ibv_ack_cq_events)
#undef ibv_reg_mr
static struct {
#define X(f) __typeof__(f) *f;
	CM(X) VERBS(X)
#undef X
	struct ibv_mr *(*ibv_reg_mr)(struct ibv_pd *, void *, size_t, int);
} lib;

int rxLoad(char *why, size_t len) {
	void *verbs = dlopen("libibverbs.so.1", RTLD_NOW | RTLD_GLOBAL), *cm = verbs ? dlopen("librdmacm.so.1", RTLD_NOW | RTLD_LOCAL) : NULL;
	if (!cm) {
		const char *e = dlerror();
		snprintf(why, len, "%s", e ? e : "cannot be loaded");
		return -1;
	}
#define X(f) \
	if (!(*(void **)&lib.f = dlsym(cm, #f))) { snprintf(why, len, "librdmacm has no %s", #f); return -1; }
	CM(X)
#undef X
#define X(f) \
	if (!(*(void **)&lib.f = dlsym(verbs, #f))) { snprintf(why, len, "libibverbs has no %s", #f); return -1; }
	VERBS(X)
	X(ibv_reg_mr)
#undef X
	return 0;
}

int rxDevices(void) {
	int n = 0;
	struct ibv_context **all = lib.rdma_get_devices(&n);
	if (all)
		lib.rdma_free_devices(all);
	return all ? n : 0;
}

static int unblock(int fd) { return fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) | O_NONBLOCK) < 0 ? -errno : 0; }

static char *slot(rxConn *c, int i) { return c->memory + (size_t)i * SLOT; }

static int post(rxConn *c, int i) {
	struct ibv_sge sge = {.addr = (uintptr_t)slot(c, i), .length = SLOT, .lkey = c->mr->lkey};
	struct ibv_recv_wr wr = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1}, *bad;
	return -ibv_post_recv(c->id->qp, &wr, &bad);
}

// begin gives the device what it receives into, and notes that all may be sent.
static int begin(rxConn *c) {
	c->credit = BUFFERS;
	for (int i = 0; i < POSTED; i++) {
		int err = post(c, i);
		if (err)
			return err;
		c->idle[c->nidle++] = POSTED + i;
	}
	return -ibv_req_notify_cq(c->cq, 0);
}

// equip makes what a connection needs on its device.
static int equip(rxConn *c) {
	struct ibv_qp_init_attr attr = {.qp_type = IBV_QPT_RC, .sq_sig_all = 1,
		.cap = {.max_send_wr = POSTED + 2, .max_recv_wr = POSTED, .max_send_sge = 1, .max_recv_sge = 1}};
	// 4.096 us * 2^16 (IBTA 1.4, 9.7.6.1.3): what is lost is sent again after 0.27 s, not after seconds.
	uint8_t timeout = 16;
	lib.rdma_set_option(c->id, RDMA_OPTION_ID, RDMA_OPTION_ID_ACK_TIMEOUT, &timeout, sizeof(timeout));
	if (!(c->pd = lib.ibv_alloc_pd(c->id->verbs)) || !(c->comp = lib.ibv_create_comp_channel(c->id->verbs)) || unblock(c->comp->fd) ||
	    !(c->cq = lib.ibv_create_cq(c->id->verbs, 2 * POSTED + 4, NULL, c->comp, 0)))
		return -errno;
	if (posix_memalign((void **)&c->memory, 4096, (size_t)2 * POSTED * SLOT))
		return -ENOMEM;
	if (!(c->mr = lib.ibv_reg_mr(c->pd, c->memory, (size_t)2 * POSTED * SLOT, IBV_ACCESS_LOCAL_WRITE)))
		return -errno;
	attr.send_cq = attr.recv_cq = c->cq;
	if (lib.rdma_create_qp(c->id, c->pd, &attr))
		return -errno;
	return begin(c);
}

// event waits for an event of the connection manager: 0 if it is the one that is expected. It gives
// up when stop is readable, if that is no negative number.
static int event(rxConn *c, enum rdma_cm_event_type want, int ms, int stop) {
	struct pollfd p[2] = {{.fd = c->channel->fd, .events = POLLIN}, {.fd = stop, .events = POLLIN}};
	struct timespec limit = {.tv_sec = ms / 1000, .tv_nsec = ms % 1000 * 1000000L};
	sigset_t all; // as Go has handlers: a signal would end the wait
	sigfillset(&all);
	int n = ppoll(p, 2, &limit, &all);
	if (n <= 0)
		return n ? -errno : -ETIMEDOUT;
	if (p[1].revents)
		return -ECANCELED;
	struct rdma_cm_event *e;
	if (lib.rdma_get_cm_event(c->channel, &e))
		return -errno;
	int err = 0;
	if (e->event != want)
		err = e->event == RDMA_CM_EVENT_REJECTED ? -ECONNREFUSED : e->status < 0 ? e->status : -EHOSTUNREACH;
	lib.rdma_ack_cm_event(e);
	return err;
}

static struct rdma_conn_param params(void) {
	return (struct rdma_conn_param){.responder_resources = 1, .initiator_depth = 1, .retry_count = 7, .rnr_retry_count = 7};
}

int rxDial(const void *addr, int ms, rxConn **out) {
	rxConn *c = calloc(1, sizeof(*c));
	if (!c)
		return -ENOMEM;
	int err = 0;
	struct rdma_conn_param p = params();
	if (!(c->channel = lib.rdma_create_event_channel()) || lib.rdma_create_id(c->channel, &c->id, c, RDMA_PS_TCP) ||
	    lib.rdma_resolve_addr(c->id, NULL, (struct sockaddr *)addr, ms))
		err = -errno;
	if (!err)
		err = event(c, RDMA_CM_EVENT_ADDR_RESOLVED, ms, -1);
	if (!err && lib.rdma_resolve_route(c->id, ms))
		err = -errno;
	if (!err)
		err = event(c, RDMA_CM_EVENT_ROUTE_RESOLVED, ms, -1);
	if (!err)
		err = equip(c);
	if (!err && lib.rdma_connect(c->id, &p))
		err = -errno;
	if (!err)
		err = event(c, RDMA_CM_EVENT_ESTABLISHED, ms, -1);
	if (!err)
		err = unblock(c->channel->fd);
	if (err)
		rxFree(c);
	else
		*out = c;
	return err;
}

int rxListen(const void *addr, int backlog, rxListener **out) {
	rxListener *l = calloc(1, sizeof(*l));
	if (!l)
		return -ENOMEM;
	int err = 0;
	if (!(l->channel = lib.rdma_create_event_channel()) || lib.rdma_create_id(l->channel, &l->id, l, RDMA_PS_TCP) ||
	    lib.rdma_bind_addr(l->id, (struct sockaddr *)addr) || lib.rdma_listen(l->id, backlog))
		err = -errno;
	if (!err)
		err = unblock(l->channel->fd);
	if (err)
		rxUnlisten(l);
	else
		*out = l;
	return err;
}

int rxListenerFd(rxListener *l) { return l->channel->fd; }

void rxUnlisten(rxListener *l) {
	if (l->id)
		lib.rdma_destroy_id(l->id);
	if (l->channel)
		lib.rdma_destroy_event_channel(l->channel);
	free(l);
}

int rxTake(rxListener *l, rxConn **out) {
	for (;;) { // the descriptor does not tell anew of what follows another event
		struct rdma_cm_event *e;
		if (lib.rdma_get_cm_event(l->channel, &e))
			return -errno;
		struct rdma_cm_id *id = e->event == RDMA_CM_EVENT_CONNECT_REQUEST ? e->id : NULL;
		lib.rdma_ack_cm_event(e);
		if (!id)
			continue;
		rxConn *c = calloc(1, sizeof(*c));
		if (c && (c->channel = lib.rdma_create_event_channel()) && !lib.rdma_migrate_id(id, c->channel)) {
			c->id = id;
			*out = c;
			return 0;
		}
		lib.rdma_destroy_id(id);
		if (c)
			rxFree(c);
	}
}

int rxFinish(rxConn *c, int ms, int stop) {
	struct rdma_conn_param p = params();
	int err = equip(c);
	if (!err && lib.rdma_accept(c->id, &p))
		err = -errno;
	if (!err)
		err = event(c, RDMA_CM_EVENT_ESTABLISHED, ms, stop);
	return err ? err : unblock(c->channel->fd);
}

int rxFd(rxConn *c) { return c->comp->fd; }
int rxCmFd(rxConn *c) { return c->channel->fd; }

static int post_send(rxConn *c, uint32_t size, uint16_t flags) {
	int i = c->idle[--c->nidle];
	struct header *h = (struct header *)slot(c, i);
	*h = (struct header){.size = size, .freed = (uint16_t)c->owed, .flags = flags};
	struct ibv_sge sge = {.addr = (uintptr_t)h, .length = (uint32_t)sizeof(*h) + size, .lkey = c->mr->lkey};
	struct ibv_send_wr wr = {.wr_id = (uint64_t)i, .sg_list = &sge, .num_sge = 1, .opcode = IBV_WR_SEND}, *bad;
	int err = ibv_post_send(c->id->qp, &wr, &bad);
	if (err) {
		c->idle[c->nidle++] = i;
		return c->broken = -err;
	}
	c->owed = 0;
	return 0;
}

static void received(rxConn *c, int i, uint32_t bytes) {
	struct header *h = (struct header *)slot(c, i);
	struct header in = *h; // once: the other end is hostile, if not its device
	if (c->broken == -EPROTO)
		return; // what follows a message that was refused would have a hole before it
	// One that says nothing is refused, too: they could come without end, and rxTurn would not return.
	if (bytes < sizeof(in) || in.size != bytes - sizeof(in) || in.freed > BUFFERS || c->credit + in.freed > BUFFERS || c->last ||
	    !(in.size || in.freed || in.flags & LAST)) {
		c->broken = -EPROTO;
		return;
	}
	c->credit += in.freed;
	if (in.flags & LAST)
		c->last = 1;
	if (!in.size) {
		int err = post(c, i);
		if (err)
			c->broken = err;
		return;
	}
	int next = (c->tail + 1) % POSTED;
	if (next == c->head) {
		c->broken = -EPROTO; // more than it had room for
		return;
	}
	c->ready[c->tail] = i;
	c->sizes[i] = in.size;
	c->tail = next;
}

static int completions(rxConn *c) {
	struct ibv_wc wc[16];
	int n, all = 0;
	while ((n = ibv_poll_cq(c->cq, 16, wc)) > 0) {
		all += n;
		for (int k = 0; k < n; k++) {
			if (wc[k].status != IBV_WC_SUCCESS) {
				if (!c->broken)
					c->broken = -ECONNRESET;
			} else if (wc[k].wr_id < POSTED) {
				received(c, (int)wc[k].wr_id, wc[k].byte_len);
			}
			if (wc[k].wr_id >= POSTED)
				c->idle[c->nidle++] = (int)wc[k].wr_id;
		}
	}
	if (n < 0 && !c->broken)
		c->broken = -EIO;
	return all;
}

// give tells the other end of half of its buffers at once.
static void give(rxConn *c) {
	if (c->owed >= BUFFERS / 2 && c->nidle > 0 && !c->broken && !c->done)
		post_send(c, 0, 0);
}

int rxTurn(rxConn *c) {
	struct ibv_cq *cq;
	void *context;
	while (!lib.ibv_get_cq_event(c->comp, &cq, &context))
		c->events++;
	do {
		if (ibv_req_notify_cq(c->cq, 0) && !c->broken)
			c->broken = -EIO;
	} while (completions(c) && !c->broken);
	give(c); // there may have been no slot for it
	return 0;
}

int rxEvents(rxConn *c) {
	struct rdma_cm_event *e;
	while (!lib.rdma_get_cm_event(c->channel, &e)) {
		if (e->event == RDMA_CM_EVENT_DISCONNECTED || e->event == RDMA_CM_EVENT_DEVICE_REMOVAL) {
			completions(c); // what came before
			if (!c->broken)
				c->broken = -ECONNRESET;
		}
		lib.rdma_ack_cm_event(e);
	}
	return 0;
}

int64_t rxRecv(rxConn *c, void *to, size_t n) {
	size_t got = 0;
	while (got < n && c->head != c->tail) {
		int i = c->ready[c->head];
		struct header *h = (struct header *)slot(c, i);
		uint32_t size = c->sizes[i];
		size_t k = n - got < size - c->at ? n - got : size - c->at;
		memcpy((char *)to + got, (char *)(h + 1) + c->at, k);
		got += k;
		c->at += (uint32_t)k;
		if (c->at < size)
			break;
		c->at = 0;
		c->head = (c->head + 1) % POSTED;
		c->owed++;
		if (!c->broken) {
			int err = post(c, i);
			if (err)
				c->broken = err;
		}
		give(c);
	}
	if (got)
		return (int64_t)got;
	return c->last ? 0 : c->broken ? c->broken : -EAGAIN;
}

int64_t rxSend(rxConn *c, const void *from, size_t n) {
	size_t sent = 0;
	while (sent < n && !c->broken && c->credit > 0 && c->nidle > EXTRA) {
		size_t k = n - sent < ROOM ? n - sent : ROOM;
		memcpy(slot(c, c->idle[c->nidle - 1]) + sizeof(struct header), (const char *)from + sent, k);
		if (post_send(c, (uint32_t)k, 0))
			break;
		c->credit--;
		sent += k;
	}
	if (sent)
		return (int64_t)sent;
	return c->broken ? c->broken : -EAGAIN;
}

int rxEnd(rxConn *c) {
	if (c->broken || c->done)
		return c->broken;
	if (!c->nidle)
		return -EAGAIN;
	c->done = 1;
	return post_send(c, 0, LAST);
}

int rxIdle(rxConn *c) { return c->broken || c->nidle == POSTED; }

void rxFree(rxConn *c) {
	if (c->id && c->id->qp) {
		lib.rdma_disconnect(c->id);
		lib.rdma_destroy_qp(c->id);
	}
	if (c->cq) {
		if (c->events)
			lib.ibv_ack_cq_events(c->cq, (unsigned)c->events);
		lib.ibv_destroy_cq(c->cq);
	}
	if (c->mr)
		lib.ibv_dereg_mr(c->mr);
	if (c->comp)
		lib.ibv_destroy_comp_channel(c->comp);
	if (c->pd)
		lib.ibv_dealloc_pd(c->pd);
	if (c->id)
		lib.rdma_destroy_id(c->id);
	if (c->channel)
		lib.rdma_destroy_event_channel(c->channel);
	free(c->memory);
	free(c);
}

void rxName(rxConn *c, int peer, void *addr) { memcpy(addr, peer ? &c->id->route.addr.dst_addr : &c->id->route.addr.src_addr, 28); }

void rxListenerName(rxListener *l, void *addr) { memcpy(addr, &l->id->route.addr.src_addr, 28); }
