/*
 * maps: what the library does while its executor does not say yet whether maps have ended, as in a swap. The main thread is the
 * executor, and answers as the cases want; the application is other threads. What never comes ends the program by an alarm.
 */
#include "../../gx.h"
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

enum { ARENA = 256 << 20, SPLIT = 8 << 20, N = 64 };

#define CALL(f, ...) (gx_dispatch.f(__VA_ARGS__))
#define CHECK(x) do { if (!(x)) { fprintf(stderr, "line %d: %s\n", __LINE__, #x); _exit(1); } } while (0)

const char *__asan_default_options(void) { return "detect_leaks=0"; }

cl_int __wrap_gx_connect(void) { return CL_SUCCESS; }

/* ---- the executor */

struct request { uint32_t op, slot, word[16]; };

static struct request next(void)
{
	struct request r = {0};
	for (;;) {
		uint64_t head = atomic_load(gx_word64(GX_HDR_HEAD));
		while (atomic_load(gx_word64(GX_HDR_TAIL)) == head)
			sched_yield();
		const uint8_t *p = S.ring + GX_RING_OFF + head % GX_RING_SIZE;
		uint32_t len;
		uint16_t w[2];
		memcpy(&len, p, 4);
		memcpy(w, p + 4, 4);
		memcpy(r.word, p + 8, len - 8 < sizeof r.word ? len - 8 : sizeof r.word);
		r.op = w[0], r.slot = w[1];
		atomic_store(gx_word64(GX_HDR_HEAD), head + len);
		if (r.op != GX_PAD)
			return r;
	}
}

static void reply(const struct request *r, const void *data, uint32_t len)
{
	uint8_t *s = S.ring + GX_SLOT_OFF + (size_t)r->slot * GX_SLOT_SIZE;
	uint64_t total = len;
	memset(s + GX_SLOT_ERR, 0, GX_SLOT_DATA - GX_SLOT_ERR);
	memcpy(s + GX_SLOT_LEN, &len, 4);
	memcpy(s + GX_SLOT_TOTAL, &total, 8);
	if (len)
		memcpy(s + GX_SLOT_DATA, data, len);
	if (atomic_exchange(gx_slot_word(r->slot, GX_SLOT_STATE), GX_SLOT_DONE) == GX_SLOT_ASLEEP)
		gx_futex_wake(gx_slot_word(r->slot, GX_SLOT_STATE), 1);
}

static void is(const struct request *r, int32_t status) { reply(r, &status, sizeof status); }

static uint64_t maps; /* that were made; each has a page of its own */
static uint8_t *mapped(uint64_t n) { return S.arena + 4096 * n; }

static uint32_t kept; /* an object that must not be released yet */

/* until answers what comes until a request of a kind. */
static struct request until(uint32_t op)
{
	static const uint32_t info[] = {0, 0, 1, 0, 1, 3, CL_DEVICE_IMAGE_SUPPORT, 4, 1, 0, CL_DEVICE_MAX_MEM_ALLOC_SIZE, 8, 1 << 20, 0, CL_DEVICE_NAME, 2, 'd', 0};
	for (;;) {
		struct request r = next();
		if (r.op == op)
			return r;
		CHECK(r.op != GX_EVENT_STATUS);
		CHECK(r.op != GX_RELEASE || r.word[0] != kept);
		if (r.op == GX_MAP_BUFFER) {
			uint64_t at = 4096 * ++maps;
			reply(&r, &at, sizeof at);
		} else if (r.slot != GX_NO_SLOT)
			reply(&r, info, r.op == GX_SESSION_INFO ? sizeof info : 0);
	}
}

/* call_back delivers a callback. */
static void call_back(uint32_t token)
{
	uint32_t tail = atomic_load(gx_word(GX_HDR_CB_TAIL)), entry[4] = {token, CL_COMPLETE};
	memcpy(S.ring + GX_CB_OFF + 16 * (tail % GX_CB_COUNT), entry, sizeof entry);
	atomic_store(gx_word(GX_HDR_CB_TAIL), tail + 1);
}

/* arrive ends a read that was staged. */
static void arrive(const struct request *r, int value)
{
	uint64_t off = r->word[4] | (uint64_t)r->word[5] << 32;
	memset(S.arena + off, value, N);
	atomic_store(gx_word(GX_PEND_OFF + 4 * r->word[12]), GX_PEND_DONE);
}

/* ---- the application */

static cl_context ctx;
static cl_command_queue q;
static uint8_t host[2][N] __attribute__((aligned(64))), apart[N];
static cl_mem mems[2], plain;
static cl_event evs[2];
static _Atomic bool over;

static bool all(const uint8_t *p, int value)
{
	for (int i = 0; i < N; i++)
		if (p[i] != value)
			return false;
	return true;
}

static void *begin(void *arg)
{
	(void)arg;
	struct gx_reply r;
	cl_device_id d = NULL;
	cl_int err;
	CHECK(!call_session_info(&(struct gx_session_info){0}, &r) && !gx_devices_load(&r));
	gx_reply_free(&r);
	CHECK(!CALL(clGetDeviceIDs, &gx_platform, CL_DEVICE_TYPE_ALL, 1, &d, NULL) && d);
	CHECK((ctx = CALL(clCreateContext, NULL, 1, &d, NULL, NULL, &err)));
	CHECK((q = CALL(clCreateCommandQueue, ctx, d, 0, &err)));
	CHECK((plain = CALL(clCreateBuffer, ctx, CL_MEM_READ_WRITE, N, NULL, &err)));
	for (int i = 0; i < 2; i++)
		CHECK((mems[i] = CALL(clCreateBuffer, ctx, CL_MEM_READ_WRITE | CL_MEM_USE_HOST_PTR, N, host[i], &err)));
	CHECK(!CALL(clFlush, q));
	return NULL;
}

static void map(int i)
{
	cl_int err;
	CHECK(CALL(clEnqueueMapBuffer, q, mems[i], CL_FALSE, CL_MAP_READ, 0, N, 0, NULL, &evs[i], &err) == host[i]);
}

static void unmap(int i)
{
	CHECK(!CALL(clEnqueueUnmapMemObject, q, mems[i], host[i], 0, NULL, NULL));
	CHECK(!CALL(clReleaseEvent, evs[i]));
}

static void read_to(uint8_t *p) { CHECK(!CALL(clEnqueueReadBuffer, q, plain, CL_FALSE, 0, N, p, 0, NULL, NULL)); }

static void finish(void) { CHECK(!CALL(clFinish, q)); }

static pthread_t go_with(void *(*f)(void *), void *arg)
{
	pthread_t t;
	CHECK(!pthread_create(&t, NULL, f, arg));
	return t;
}

static pthread_t go(void *(*f)(void *)) { return go_with(f, NULL); }

/* end lets a thread of the application end, which posts its last requests without waiting. */
static void end(pthread_t t) { CHECK(!pthread_join(t, NULL)); }

/* While one thread waits for the word about a map, another begins a transfer. */
static void *maps_and_waits(void *arg)
{
	map(0);
	finish();
	CHECK(all(host[0], 1));
	unmap(0);
	return arg;
}

static void *reads(void *arg)
{
	read_to(apart);
	return arg;
}

static void others_go_on(void)
{
	pthread_t a = go(maps_and_waits);
	struct request asked = until(GX_EVENT_STATUS);
	pthread_t b = go(reads);
	struct request read = until(GX_READ_BUFFER);
	end(b);
	arrive(&read, 2);
	memset(mapped(maps), 1, N);
	is(&asked, CL_COMPLETE);
	end(a);
	CHECK(all(apart, 2));
}

/* A map, and a read to the same memory. */
static void *maps_and_reads(void *arg)
{
	map(0);
	read_to(host[0]);
	finish();
	CHECK(all(host[0], 2));
	return arg;
}

/* The map was asked for before it ended, and its read has come since: the map's data is the older. */
static void map_ends_after_it_was_asked(void)
{
	pthread_t a = go(maps_and_reads);
	struct request read = until(GX_READ_BUFFER), asked = until(GX_EVENT_STATUS);
	memset(mapped(maps), 1, N);
	arrive(&read, 2);
	is(&asked, CL_QUEUED);
	asked = until(GX_EVENT_STATUS);
	is(&asked, CL_COMPLETE);
	end(a);
	unmap(0);
}

/* The read has ended, and the map has not: its data is the newer, whatever the order of the calls. */
static void *finishes(void *arg)
{
	finish();
	CHECK(all(host[0], 1));
	unmap(0);
	return arg;
}

static void map_ends_after_the_read(void)
{
	pthread_t a = go(maps_and_reads);
	struct request read = until(GX_READ_BUFFER), asked = until(GX_EVENT_STATUS);
	arrive(&read, 2);
	is(&asked, CL_QUEUED);
	asked = until(GX_EVENT_STATUS);
	is(&asked, CL_QUEUED);
	end(a);
	a = go(finishes);
	asked = until(GX_EVENT_STATUS);
	memset(mapped(maps), 1, N);
	is(&asked, CL_COMPLETE);
	end(a);
}

/* One thread waits for the word about the first of two maps, and another is told that it has ended: an old word that comes
 * late changes nothing. */
static void *maps_twice(void *arg)
{
	map(0);
	map(1);
	finish();
	unmap(0);
	unmap(1);
	return arg;
}

static void *waits(void *arg)
{
	CHECK(!CALL(clWaitForEvents, 1, &evs[0]));
	CHECK(all(host[0], 3));
	return arg;
}

static void old_word_comes_late(void)
{
	pthread_t a = go(maps_twice);
	struct request first = until(GX_EVENT_STATUS);
	memset(mapped(maps - 1), 3, N);
	pthread_t b = go(waits);
	struct request second = until(GX_EVENT_STATUS);
	is(&first, CL_QUEUED);
	struct request third = until(GX_EVENT_STATUS); /* so the word has been read */
	is(&second, CL_QUEUED);
	end(b);
	is(&third, CL_COMPLETE);
	end(a);
}

/* What a map that has failed was to bring is not in the application's memory. It is not sent back. */
static void *fails(void *arg)
{
	cl_int err;
	memset(host[0], 1, N);
	CHECK(CALL(clEnqueueMapBuffer, q, mems[0], CL_FALSE, CL_MAP_READ | CL_MAP_WRITE, 0, N, 0, NULL, &evs[0], &err) == host[0]);
	finish();
	unmap(0);
	return arg;
}

static void failed_map_is_not_sent(void)
{
	pthread_t a = go(fails);
	struct request asked = until(GX_EVENT_STATUS);
	memset(mapped(maps), 2, N);
	is(&asked, CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
	until(GX_UNMAP);
	end(a);
	CHECK(all(mapped(maps), 2));
}

/* A wait for more events than a request has room for, of which the first has failed. */
static void *waits_for_many(void *arg)
{
	enum { MANY = 1026 };
	static cl_event many[MANY];
	cl_int err;
	CHECK((many[0] = CALL(clCreateUserEvent, ctx, &err)));
	CHECK(!CALL(clSetUserEventStatus, many[0], -5));
	for (int i = 1; i < MANY; i++)
		CHECK(!CALL(clEnqueueMarkerWithWaitList, q, 0, NULL, &many[i]));
	CHECK(CALL(clWaitForEvents, MANY, many) == CL_EXEC_STATUS_ERROR_FOR_EVENTS_IN_WAIT_LIST);
	atomic_store(&over, true);
	return arg;
}

static void all_are_waited_for(void)
{
	pthread_t a = go(waits_for_many);
	struct request asked = until(GX_WAIT_EVENTS);
	reply(&asked, NULL, 0);
	for (uint64_t head = atomic_load(gx_word64(GX_HDR_HEAD)); atomic_load(gx_word64(GX_HDR_TAIL)) == head; sched_yield())
		CHECK(!atomic_load(&over));
	asked = until(GX_WAIT_EVENTS);
	CHECK(!atomic_load(&over));
	reply(&asked, NULL, 0);
	end(a);
}

/* An object that was released lives until its map has ended: what the map brings is for the application's memory, also if the
 * application makes no call any more. */
static void *releases(void *arg)
{
	map(1);
	CHECK(!CALL(clReleaseMemObject, mems[1]));
	CHECK(!CALL(clReleaseEvent, evs[1]));
	CHECK(!CALL(clFlush, q));
	return arg;
}

static void map_of_a_released_object_brings_its_content(void)
{
	uint32_t id = kept = mems[1]->o.id;
	memset(host[1], 1, N);
	pthread_t a = go(releases);
	struct request asked, watch = until(GX_EVENT_CALLBACK);
	until(GX_FLUSH);
	end(a);
	memset(mapped(maps), 2, N);
	call_back(watch.word[2]);
	asked = until(GX_EVENT_STATUS);
	kept = 0;
	is(&asked, CL_COMPLETE);
	while (until(GX_RELEASE).word[0] != id)
		;
	CHECK(all(host[1], 2));
}

/* A thread that the application has cancelled ends where it waits for a GPU, or when its call has ended, and keeps no
 * lock from the others. */
cl_int __real_gx_connect(void);

static void *connects(void *arg)
{
	CHECK(__real_gx_connect());
	return arg;
}

static void cancelled_while_it_waits_for_a_gpu(void)
{
	struct sockaddr_un at = {.sun_family = AF_UNIX};
	char hello[64];
	snprintf(at.sun_path, sizeof at.sun_path, "/tmp/gx-maps-%d", (int)getpid());
	int server = socket(AF_UNIX, SOCK_STREAM, 0);
	CHECK(!bind(server, (struct sockaddr *)&at, sizeof at) && !listen(server, 2) && !setenv("GPUCTL_SOCKET", at.sun_path, 1));
	pthread_t a = go(connects);
	int sock = accept(server, NULL, NULL);
	CHECK(recv(sock, hello, sizeof hello, MSG_WAITALL) == sizeof hello);
	CHECK(!pthread_cancel(a));
	end(a);
	CHECK(recv(sock, hello, 1, 0) == 0);
	a = go(connects);
	close(accept(server, NULL, NULL));
	end(a);
	unlink(at.sun_path);
}

static void *frees(void *arg)
{
	uint64_t off, len = 100 << 20; /* ends behind the window */
	CHECK(!gx_stage_wait(len, &off));
	if (arg)
		CHECK(!pthread_cancel(pthread_self()));
	gx_stage_free(off, len);
	return arg;
}

static void *posts(void *arg)
{
	if (arg)
		CHECK(!pthread_cancel(pthread_self()));
	while (!CALL(clEnqueueMarkerWithWaitList, q, 0, NULL, NULL))
		;
	return arg;
}

static void CL_CALLBACK lingers(cl_event e, cl_int status, void *user)
{
	(void)e, (void)status, (void)user;
	atomic_store(&over, false);
	while (!atomic_load(&over))
		usleep(1000);
}

/* lingers_long keeps the thread of the callbacks from finding out that the session is lost. */
static void *lingers_long(void *arg)
{
	cl_int err;
	cl_event e = CALL(clCreateUserEvent, ctx, &err);
	CHECK(e && !CALL(clSetEventCallback, e, CL_COMPLETE, lingers, NULL));
	return arg;
}

static void cancelled_in_a_call(void)
{
	end(go_with(frees, &over));
	end(go(frees));
	atomic_store(&over, true);
	end(go(lingers_long));
	call_back(until(GX_EVENT_CALLBACK).word[2]);
	while (atomic_load(&over))
		usleep(1000);
	pthread_t a = go_with(posts, &over); /* until the ring is full */
	usleep(50000);
	atomic_store(gx_word(GX_HDR_STATE), GX_STATE_LOST);
	end(a);
	end(go(posts));
	atomic_store(&over, true);
}

int main(void)
{
	gx_enter(); /* sets up what a forked child sets up */
	S.ring = mmap(NULL, GX_RING_MEM, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
	S.arena = mmap(NULL, ARENA, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	CHECK(S.ring != MAP_FAILED && S.arena != MAP_FAILED);
	S.arena_size = ARENA, S.split = SPLIT;
	atomic_store(gx_word(GX_HDR_STATE), GX_STATE_RUNNING);
	atomic_store(&S.up, true);
	alarm(60);
	pthread_t a = go(begin);
	until(GX_FLUSH);
	end(a);
	others_go_on();
	map_ends_after_it_was_asked();
	map_ends_after_the_read();
	old_word_comes_late();
	failed_map_is_not_sent();
	all_are_waited_for();
	map_of_a_released_object_brings_its_content();
	cancelled_while_it_waits_for_a_gpu();
	cancelled_in_a_call();
	return 0;
}
