// What a connection takes from the other end, which is hostile: its messages come to a device that is not there.
#include "../../verbs.c"

#define CHECK(what) \
	do { \
		if (!(what)) { \
			fprintf(stderr, "%s:%d: not so: %s\n", __FILE__, __LINE__, #what); \
			abort(); \
		} \
	} while (0)

static struct {
	rxConn *c;
	int posted[POSTED], nposted; // slots that wait for a message, in order
	int sending[POSTED], nsending;
	struct ibv_wc done[4 * POSTED];
	int ndone;
	int full; // messages with bytes that were sent and not given back
} device;

static int slot_of(const struct ibv_sge *sge, uint64_t id) {
	CHECK(id < 2 * POSTED && sge->addr == (uintptr_t)slot(device.c, (int)id) && sge->length <= SLOT);
	return (int)id;
}

static int post_recv(struct ibv_qp *qp, struct ibv_recv_wr *wr, struct ibv_recv_wr **bad) {
	(void)qp, (void)bad;
	int i = slot_of(wr->sg_list, wr->wr_id);
	CHECK(i < POSTED && device.nposted < POSTED && wr->sg_list->length == SLOT);
	for (int k = 0; k < device.nposted; k++)
		CHECK(device.posted[k] != i);
	device.posted[device.nposted++] = i;
	return 0;
}

static int send_message(struct ibv_qp *qp, struct ibv_send_wr *wr, struct ibv_send_wr **bad) {
	(void)qp, (void)bad;
	int i = slot_of(wr->sg_list, wr->wr_id);
	struct header *h = (struct header *)slot(device.c, i);
	CHECK(i >= POSTED && device.nsending < POSTED && h->size + sizeof(*h) == wr->sg_list->length && h->freed <= POSTED);
	for (int k = 0; k < device.nsending; k++)
		CHECK(device.sending[k] != i);
	device.sending[device.nsending++] = i;
	device.full += h->size > 0;
	CHECK(device.full <= BUFFERS);
	return 0;
}

static int poll_cq(struct ibv_cq *cq, int n, struct ibv_wc *wc) {
	(void)cq;
	n = n < device.ndone ? n : device.ndone;
	memcpy(wc, device.done, (size_t)n * sizeof(*wc));
	memmove(device.done, device.done + n, (size_t)(device.ndone -= n) * sizeof(*wc));
	return n;
}

static int req_notify(struct ibv_cq *cq, int solicited) { return (void)cq, (void)solicited, 0; }
static int no_event(struct ibv_comp_channel *ch, struct ibv_cq **cq, void **context) { return (void)ch, (void)cq, (void)context, -1; }

static const uint8_t *in, *end;
static uint32_t next(int bytes) {
	uint32_t v = 0;
	for (; bytes-- > 0; in += in < end)
		v = v << 8 | (in < end ? *in : 0);
	return v;
}

// message has the device take a message that the fuzzer chose; its bytes count on. It returns how many of them
// are for the reader.
static uint32_t message(uint8_t *count) {
	if (!device.nposted)
		return 0; // the device waits
	int i = device.posted[0], credit = device.c->credit, last = device.c->last, tail = device.c->tail, refused = device.c->broken == -EPROTO;
	memmove(device.posted, device.posted + 1, (size_t)--device.nposted * sizeof(int));
	uint32_t bytes = next(3) % (SLOT + 1);
	uint32_t size = next(1) % 8 ? bytes - (uint32_t)sizeof(struct header) : next(4);
	uint32_t freed = next(1) % 8 ? next(1) % 4 : next(2);
	uint32_t flags = next(1) % 16 ? 0 : next(2);
	struct header h = {.size = size, .freed = (uint16_t)freed, .flags = (uint16_t)flags};
	uint8_t *to = (uint8_t *)slot(device.c, i);
	memcpy(to, &h, bytes < sizeof(h) ? bytes : sizeof(h));
	uint8_t from = *count;
	for (uint32_t k = sizeof(h); k < bytes; k++)
		to[k] = from++;
	device.done[device.ndone++] = (struct ibv_wc){.wr_id = (uint64_t)i, .status = IBV_WC_SUCCESS, .byte_len = bytes};
	rxTurn(device.c);
	if (device.c->broken == -EPROTO) {
		CHECK(device.c->tail == tail);
		return 0;
	}
	CHECK(!refused && (device.c->tail != tail) == (size > 0) && bytes >= sizeof(h) && size == bytes - sizeof(h) && device.c->credit == credit + h.freed && device.c->credit <= BUFFERS && !last && (size || h.freed || h.flags & LAST));
	device.full -= h.freed;
	CHECK(device.full >= 0);
	*count = from;
	return size;
}

static void sent(void) {
	if (!device.nsending)
		return;
	int failed = next(1) % 32 == 1;
	device.done[device.ndone++] = (struct ibv_wc){.wr_id = (uint64_t)device.sending[0], .status = failed ? IBV_WC_RETRY_EXC_ERR : IBV_WC_SUCCESS};
	memmove(device.sending, device.sending + 1, (size_t)--device.nsending * sizeof(int));
	rxTurn(device.c);
	CHECK(!failed || device.c->broken);
	CHECK(device.c->owed < BUFFERS / 2 || device.c->broken || device.c->done); // or both ends would wait
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
	in = data, end = data + size;
	memset(&device, 0, sizeof(device));
	lib.ibv_get_cq_event = no_event;
	struct ibv_context context = {.ops = {.post_recv = post_recv, .post_send = send_message, .poll_cq = poll_cq, .req_notify_cq = req_notify}};
	struct ibv_qp qp = {.context = &context};
	struct ibv_cq cq = {.context = &context};
	struct ibv_mr mr = {0};
	struct rdma_cm_id id = {.qp = &qp};
	rxConn *c = device.c = calloc(1, sizeof(*c));
	CHECK(c && (c->memory = malloc((size_t)2 * POSTED * SLOT)));
	c->id = &id, c->cq = &cq, c->mr = &mr;
	CHECK(!begin(c));
	uint8_t written = 0, readnext = 0;
	uint64_t waiting = 0; // bytes for the reader
	while (in < end) {
		switch (next(1) % 8) {
		case 0: case 1: case 2:
			waiting += message(&written);
			break;
		case 3:
			sent();
			break;
		case 4: case 5: {
			size_t n = next(3) % (3 * ROOM) + 1;
			uint8_t *to = malloc(n); // exactly so many: the sanitizer sees one more
			CHECK(to);
			int64_t got = rxRecv(c, to, n);
			CHECK(waiting ? got == (int64_t)(n < waiting ? n : waiting) : got == (c->last ? 0 : c->broken ? c->broken : -EAGAIN));
			for (int64_t k = 0; k < got; k++)
				CHECK(to[k] == readnext++);
			waiting -= got > 0 ? (uint64_t)got : 0;
			free(to);
			break;
		}
		case 6: {
			size_t n = next(3) % (3 * ROOM) + 1;
			uint8_t *from = calloc(1, n);
			CHECK(from && rxSend(c, from, n) <= (int64_t)n);
			free(from);
			break;
		}
		case 7:
			if (next(1) % 16 == 0)
				rxEnd(c);
			rxIdle(c);
		}
		CHECK(c->credit >= 0 && c->credit <= BUFFERS && c->nidle >= 0 && c->nidle + device.nsending + device.ndone <= POSTED);
	}
	free(c->memory);
	free(c);
	return 0;
}

#ifdef REPLAY
int main(int argc, char **argv) {
	static uint8_t bytes[1 << 20];
	for (int i = 1; i < argc; i++) {
		FILE *f = fopen(argv[i], "rb");
		CHECK(f);
		LLVMFuzzerTestOneInput(bytes, fread(bytes, 1, sizeof(bytes), f));
		fclose(f);
	}
	return 0;
}
#endif
