// A device for RDMA within one process, in the place of librdmacm and libibverbs. What goes wrong
// there is said in the environment, so that a test can choose it while it runs.
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <pthread.h>
#include <rdma/rdma_cma.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

enum { MOST = 64 };

struct channel {
	struct rdma_event_channel pub;
	int in;
};
struct comp {
	struct ibv_comp_channel pub;
	int in;
};
struct cq {
	struct ibv_cq pub;
	struct ibv_wc wc[4 * MOST];
	int n, armed;
};
struct work {
	uint64_t id, at;
	uint32_t size;
};
struct qp {
	struct ibv_qp pub;
	struct qp *peer;
	struct work recv[MOST], send[MOST];
	int nrecv, nsend;
};
struct id {
	struct rdma_cm_id pub;
	struct id *peer;
};

static pthread_mutex_t mu = PTHREAD_MUTEX_INITIALIZER;
static struct id *listeners[1 << 16];

static int is(const char *what) { return getenv(what) != NULL; }
static int fail(int err) { return errno = err, -1; }
static struct sockaddr_in6 *own(struct id *i) { return (struct sockaddr_in6 *)&i->pub.route.addr.src_addr; }
static struct sockaddr_in6 *far(struct id *i) { return (struct sockaddr_in6 *)&i->pub.route.addr.dst_addr; }
// Whether the other end is 192.0.2.1.
static int first(struct id *i) { return ((struct sockaddr_in *)far(i))->sin_addr.s_addr == htonl(0xc0000201u); }

static void tell(struct id *i, struct id *to, enum rdma_cm_event_type what) {
	struct rdma_cm_event *e = calloc(1, sizeof(*e));
	e->id = &i->pub, e->event = what;
	if (write(((struct channel *)to->pub.channel)->in, &e, sizeof(e)) != sizeof(e))
		abort();
}

static void complete(struct ibv_cq *to, uint64_t id, uint32_t size, enum ibv_wc_status status) {
	struct cq *c = (struct cq *)to;
	c->wc[c->n++] = (struct ibv_wc){.wr_id = id, .byte_len = size, .status = status};
	if (c->armed && write(((struct comp *)c->pub.channel)->in, &c, sizeof(c)) != sizeof(c))
		abort();
	c->armed = 0;
}

static struct work take(struct work *all, int *n) {
	struct work w = all[0];
	memmove(all, all + 1, (size_t)--*n * sizeof(*all));
	return w;
}

static void move(struct qp *q) {
	while (q->nsend && (!q->peer || q->peer->nrecv)) {
		struct work s = take(q->send, &q->nsend);
		if (q->peer) {
			struct work r = take(q->peer->recv, &q->peer->nrecv);
			memcpy((void *)r.at, (void *)s.at, s.size);
			complete(q->peer->pub.recv_cq, r.id, s.size, IBV_WC_SUCCESS);
		}
		if (!is("RDMA_DEAF")) // no acknowledgement
			complete(q->pub.send_cq, s.id, 0, q->peer ? IBV_WC_SUCCESS : IBV_WC_RETRY_EXC_ERR);
	}
}

static int add(struct work *all, int *n, uint64_t id, struct ibv_sge *s) {
	if (*n == MOST)
		return ENOMEM;
	all[(*n)++] = (struct work){id, s->addr, s->length};
	return 0;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
	struct qp *q = (struct qp *)qp;
	(void)bad;
	pthread_mutex_lock(&mu);
	int err = add(q->recv, &q->nrecv, wr->wr_id, wr->sg_list);
	if (q->peer)
		move(q->peer);
	pthread_mutex_unlock(&mu);
	return err;
}

static int post_send(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
	struct qp *q = (struct qp *)qp;
	(void)bad;
	pthread_mutex_lock(&mu);
	int err = add(q->send, &q->nsend, wr->wr_id, wr->sg_list);
	move(q);
	pthread_mutex_unlock(&mu);
	return err;
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
	struct cq *c = (struct cq *)cq;
	pthread_mutex_lock(&mu);
	n = n < c->n ? n : c->n;
	memcpy(wc, c->wc, (size_t)n * sizeof(*wc));
	memmove(c->wc, c->wc + n, (size_t)(c->n -= n) * sizeof(*wc));
	pthread_mutex_unlock(&mu);
	return n;
}

static int req_notify(struct ibv_cq *cq, int solicited) {
	(void)solicited;
	pthread_mutex_lock(&mu);
	((struct cq *)cq)->armed = 1;
	pthread_mutex_unlock(&mu);
	return 0;
}

static struct ibv_context context = {.ops = {.post_recv = post_recv, .post_send = post_send, .poll_cq = poll_cq, .req_notify_cq = req_notify}};
static struct ibv_context *devices[] = {&context, NULL};

struct ibv_context **rdma_get_devices(int *n) { return *n = 1, devices; }
void rdma_free_devices(struct ibv_context **all) { (void)all; }
int rdma_set_option(struct rdma_cm_id *id, int level, int name, void *value, size_t n) { return (void)id, (void)level, (void)name, (void)value, (void)n, 0; }

struct rdma_event_channel *rdma_create_event_channel(void) {
	struct channel *c = calloc(1, sizeof(*c));
	int p[2];
	if (pipe2(p, O_CLOEXEC))
		return free(c), NULL;
	c->pub.fd = p[0], c->in = p[1];
	return &c->pub;
}

void rdma_destroy_event_channel(struct rdma_event_channel *ch) {
	close(ch->fd), close(((struct channel *)ch)->in);
	free(ch);
}

int rdma_get_cm_event(struct rdma_event_channel *ch, struct rdma_cm_event **e) {
	if (is("RDMA_LOST")) // the device
		return fail(EIO);
	return read(ch->fd, e, sizeof(*e)) == sizeof(*e) ? 0 : -1;
}
int rdma_ack_cm_event(struct rdma_cm_event *e) { return free(e), 0; }

int rdma_create_id(struct rdma_event_channel *ch, struct rdma_cm_id **out, void *ctx, enum rdma_port_space ps) {
	struct id *i = calloc(1, sizeof(*i));
	i->pub.channel = ch, i->pub.context = ctx, i->pub.ps = ps;
	*out = &i->pub;
	return 0;
}

int rdma_destroy_id(struct rdma_cm_id *id) {
	struct id *i = (struct id *)id;
	pthread_mutex_lock(&mu);
	for (int n = 0; n < 1 << 16; n++)
		if (listeners[n] == i)
			listeners[n] = NULL;
	if (i->peer)
		tell(i->peer, i->peer, RDMA_CM_EVENT_REJECTED), i->peer->peer = NULL;
	pthread_mutex_unlock(&mu);
	free(i);
	return 0;
}

int rdma_migrate_id(struct rdma_cm_id *id, struct rdma_event_channel *ch) {
	if (is("RDMA_NO_ROOM") && first((struct id *)id))
		return fail(ENOMEM);
	return id->channel = ch, 0;
}

int rdma_resolve_addr(struct rdma_cm_id *id, struct sockaddr *from, struct sockaddr *to, int ms) {
	struct id *i = (struct id *)id;
	(void)from, (void)ms;
	memcpy(far(i), to, to->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
	*(struct sockaddr_in *)own(i) = (struct sockaddr_in){.sin_family = AF_INET, .sin_addr = ((struct sockaddr_in *)far(i))->sin_addr};
	id->verbs = &context;
	tell(i, i, RDMA_CM_EVENT_ADDR_RESOLVED);
	return 0;
}

int rdma_resolve_route(struct rdma_cm_id *id, int ms) { return (void)ms, tell((struct id *)id, (struct id *)id, RDMA_CM_EVENT_ROUTE_RESOLVED), 0; }

int rdma_bind_addr(struct rdma_cm_id *id, struct sockaddr *at) {
	static uint16_t port = 1000;
	struct sockaddr_in6 *a = own((struct id *)id);
	memcpy(a, at, at->sa_family == AF_INET6 ? sizeof(struct sockaddr_in6) : sizeof(struct sockaddr_in));
	if (!a->sin6_port)
		a->sin6_port = htons(++port);
	return 0;
}

int rdma_listen(struct rdma_cm_id *id, int backlog) {
	struct id **at = &listeners[ntohs(own((struct id *)id)->sin6_port)];
	(void)backlog;
	if (*at)
		return fail(EADDRINUSE);
	*at = (struct id *)id;
	return 0;
}

int rdma_connect(struct rdma_cm_id *id, struct rdma_conn_param *p) {
	struct id *i = (struct id *)id;
	(void)p;
	pthread_mutex_lock(&mu);
	struct id *l = listeners[ntohs(far(i)->sin6_port)];
	if (l) {
		struct id *child = calloc(1, sizeof(*child));
		child->pub.verbs = &context, child->peer = i, i->peer = child;
		*own(child) = *far(i), *far(child) = *own(i);
		if (is("RDMA_OTHER_EVENT")) // as when an address of the device has changed
			tell(l, l, RDMA_CM_EVENT_ADDR_CHANGE);
		tell(child, l, RDMA_CM_EVENT_CONNECT_REQUEST);
	} else {
		tell(i, i, RDMA_CM_EVENT_REJECTED);
	}
	pthread_mutex_unlock(&mu);
	return 0;
}

int rdma_accept(struct rdma_cm_id *id, struct rdma_conn_param *p) {
	struct id *i = (struct id *)id;
	(void)p;
	if (is("RDMA_SLOW"))
		for (struct timespec left = {.tv_nsec = 100000000}; nanosleep(&left, &left);)
			;
	if (is("RDMA_MUTE") && first(i)) // who connects says no more
		return 0;
	pthread_mutex_lock(&mu);
	if (i->peer) {
		struct qp *a = (struct qp *)i->pub.qp, *b = (struct qp *)i->peer->pub.qp;
		a->peer = b, b->peer = a;
		tell(i->peer, i->peer, RDMA_CM_EVENT_ESTABLISHED);
		tell(i, i, RDMA_CM_EVENT_ESTABLISHED);
	}
	pthread_mutex_unlock(&mu);
	return 0;
}

int rdma_disconnect(struct rdma_cm_id *id) {
	struct id *i = (struct id *)id;
	pthread_mutex_lock(&mu);
	if (i->peer) {
		tell(i->peer, i->peer, RDMA_CM_EVENT_DISCONNECTED);
		i->peer->peer = NULL, i->peer = NULL;
	}
	pthread_mutex_unlock(&mu);
	return 0;
}

int rdma_create_qp(struct rdma_cm_id *id, struct ibv_pd *pd, struct ibv_qp_init_attr *attr) {
	struct qp *q = calloc(1, sizeof(*q));
	(void)pd;
	q->pub.context = &context, q->pub.send_cq = attr->send_cq, q->pub.recv_cq = attr->recv_cq;
	id->qp = &q->pub;
	return 0;
}

void rdma_destroy_qp(struct rdma_cm_id *id) {
	struct qp *q = (struct qp *)id->qp;
	pthread_mutex_lock(&mu);
	if (q->peer)
		q->peer->peer = NULL, move(q->peer);
	pthread_mutex_unlock(&mu);
	free(q);
	id->qp = NULL;
}

struct ibv_pd *ibv_alloc_pd(struct ibv_context *c) { return (void)c, calloc(1, sizeof(struct ibv_pd)); }
int ibv_dealloc_pd(struct ibv_pd *pd) { return free(pd), 0; }
#undef ibv_reg_mr
struct ibv_mr *ibv_reg_mr(struct ibv_pd *pd, void *at, size_t n, int access) { return (void)pd, (void)at, (void)n, (void)access, calloc(1, sizeof(struct ibv_mr)); }
int ibv_dereg_mr(struct ibv_mr *mr) { return free(mr), 0; }

struct ibv_comp_channel *ibv_create_comp_channel(struct ibv_context *c) {
	struct comp *n = calloc(1, sizeof(*n));
	int p[2];
	(void)c;
	if (pipe2(p, O_CLOEXEC))
		return free(n), NULL;
	n->pub.fd = p[0], n->in = p[1];
	return &n->pub;
}

int ibv_destroy_comp_channel(struct ibv_comp_channel *c) { return close(c->fd), close(((struct comp *)c)->in), free(c), 0; }

struct ibv_cq *ibv_create_cq(struct ibv_context *c, int n, void *ctx, struct ibv_comp_channel *ch, int vector) {
	struct cq *q = calloc(1, sizeof(*q));
	(void)n, (void)ctx, (void)vector;
	q->pub.context = c, q->pub.channel = ch;
	return &q->pub;
}

int ibv_destroy_cq(struct ibv_cq *c) { return free(c), 0; }
int ibv_get_cq_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **ctx) { return *ctx = NULL, read(ch->fd, cq, sizeof(*cq)) == sizeof(*cq) ? 0 : -1; }
void ibv_ack_cq_events(struct ibv_cq *cq, unsigned n) { (void)cq, (void)n; }
