/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What must hold, on any driver.
 *
 * Order is tested with a job that lasts until the test lets it go, so that there is
 * no race in either direction: with a wait nothing may move before, and without one
 * the old bytes must be seen, or the test would show nothing.
 */
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "examples/timeline.h"
#include "tests/gpu/works/works.h"

#define PAGE (64 * KIB)
#define OLD 0x11
#define NEW 0x22
#define FREED 0x33

/* ---- bytes ---- */

static void move(const char *transports, unsigned int daemons, enum where from,
		 enum where to)
{
	static const struct {
		uint64_t bytes, count;
	} forms[] = {{64 * KIB, 100}, {4 * KIB, 1500}, {256, 9000}, {100, 777}, {1, 33}};
	struct engine src, dst;
	struct rig rig = {0};

	rig_start(&rig, daemons, transports);
	engine_open(&src, &rig, 0, from, 8 * MIB);
	engine_open(&dst, &rig, daemons - 1, to, 8 * MIB);
	for (size_t i = 0; i < sizeof(forms) / sizeof(forms[0]); i++) {
		for (int asks = 0; asks < 2; asks++) {
			struct rows rows;

			rows_make(&rows, forms[i].bytes, forms[i].count, 8 * MIB);
			engine_pattern(&src, i * 2 + (uint64_t)asks);
			engine_fill(&dst, 0xee);
			(void)xfer_run(rows_xfer(&rows, &src, &dst, asks));
			rows_check(&rows, &src, &dst);
			rows_free(&rows);
		}
	}
	engine_close(&src);
	engine_close(&dst);
	rig_stop(&rig);
}

static void local_one_daemon(void)
{
	move("local", 1, AT_GPU, AT_GPU);
}

static void local_two_daemons(void)
{
	move("local", 2, AT_GPU, AT_GPU);
}

static void local_from_host(void)
{
	move("local", 2, AT_HOST, AT_GPU);
}

static void local_to_host(void)
{
	move("local", 2, AT_GPU, AT_HOST);
}

static void local_vmm(void)
{
	move("local", 2, AT_GPU_VMM, AT_GPU_VMM);
}

static void staged_shm(void)
{
	move("shm", 2, AT_GPU, AT_GPU);
}

static void staged_tcp(void)
{
	move("tcp", 2, AT_GPU, AT_GPU);
}

/* As PyTorch's allocator hands them out: tensors inside one allocation, at any
 * multiple of 512 bytes. */
static void tensors_of_one_allocation(void)
{
	const uint64_t offsets[] = {512, 3 * MIB + 512, 9 * MIB};
	struct kvd_region *regions[3];
	struct kvd_dlist *lists[2];
	struct kvd_xfer_args args = {.op = KVD_WRITE};
	struct kvd_xfer *xfer = NULL;
	struct engine other;
	uint8_t bytes[4096];
	struct rig rig = {0};
	uint64_t base;

	rig_start(&rig, 1, "local");
	engine_open(&other, &rig, 0, AT_GPU, MIB);
	base = cuda_alloc(16 * MIB);
	cu(cuda.fill(base, OLD, 16 * MIB, cuda.stream), "cuMemsetD8Async");
	cu(cuda.fill(base + offsets[1], NEW, MIB, cuda.stream), "cuMemsetD8Async");
	cuda_sync();
	for (size_t i = 0; i < 3; i++)
		region_ipc(other.client, base, offsets[i], MIB, &regions[i]);
	for (size_t i = 0; i < 2; i++) { /* of the second tensor, to the third */
		const uint64_t pair[] = {base + offsets[i + 1] + 4096, 8192};

		well(other.client,
		     kvd_dlist_prep(other.client, i ? engine_attach(&other, &other) : 0,
				    pair, 1, 2, &lists[i]),
		     "a list");
	}
	args.local = lists[0];
	args.remote = lists[1];
	well(other.client, kvd_xfer_make(other.client, &args, &xfer), "a transfer");
	(void)xfer_run(xfer);
	cu(cuda.to_host(bytes, base + offsets[2] + 4096 + 8192 - sizeof(bytes),
			sizeof(bytes)),
	   "cuMemcpyDtoH");
	if (bytes[0] != NEW || bytes[sizeof(bytes) - 1] != NEW)
		die("the bytes are not those of the tensor");
	cu(cuda.to_host(bytes, base + offsets[2] + 4096 + 8192, sizeof(bytes)),
	   "cuMemcpyDtoH");
	if (bytes[0] != OLD)
		die("bytes behind the row were written");
	engine_close(&other);
	rig_stop(&rig);
}

/* ---- order ---- */

struct order {
	struct rig rig;
	struct engine src, dst;
	struct timeline timeline; /* if `timed` */
	bool timed;
	struct hold *hold;
	struct kvd_wait wait;
};

/* With a timeline of the destination's stream or of the source's, or without. */
static void order_start(struct order *o, bool point, bool at_dst)
{
	struct kvd_client *client;

	*o = (struct order){0};
	rig_start(&o->rig, 2, "local");
	engine_open(&o->src, &o->rig, 0, AT_GPU, 2 * MIB);
	engine_open(&o->dst, &o->rig, 1, AT_GPU, 2 * MIB);
	engine_pool(&o->src, PAGE);
	engine_pool(&o->dst, PAGE);
	engine_fill(&o->src, OLD);
	engine_fill(&o->dst, 0);
	client = (at_dst ? &o->dst : &o->src)->client;
	o->timed = point;
	if (point && timeline_open(&o->timeline, client, cuda.stream, cuda_library()) < 0)
		die("%s", o->timeline.why);
}

/* Behind a job that lasts: a step that writes `byte` to the page, then the point. */
static void order_step(struct order *o, struct engine *e, uint32_t page, uint8_t byte)
{
	o->hold = hold_begin(cuda.stream);
	cu(cuda.fill(e->base + page * PAGE, byte, PAGE, cuda.stream), "cuMemsetD8Async");
	if (o->timed && timeline_mark(&o->timeline, &o->wait) < 0)
		die("%s", o->timeline.why);
}

/* The daemons have had every occasion to go on. */
static void order_is_kept(struct order *o, struct kvd_room *send, struct kvd_room *recv)
{
	char *text = NULL;

	if (kvd_room_wait(send, KVD_TRANSFERRING, WAIT_MS) != KVD_TRANSFERRING)
		die("the room did not begin");
	for (int i = 0; i < 300; i++) {
		well(o->src.client, kvd_command(o->src.client, "ping", NULL, 0, &text),
		     "ping");
		kvd_string_free(text);
		well(o->dst.client, kvd_command(o->dst.client, "ping", NULL, 0, &text),
		     "ping");
		kvd_string_free(text);
		if (kvd_room_state(send) == KVD_SUCCESS ||
		    kvd_room_state(recv) == KVD_SUCCESS)
			die("bytes moved before the point was passed");
	}
}

static void order_stop(struct order *o, struct engine *e, uint32_t page, uint8_t wanted)
{
	uint8_t bytes[PAGE];

	cuda_sync();
	engine_get(e, page * PAGE, bytes, sizeof(bytes));
	for (size_t i = 0; i < sizeof(bytes); i++)
		if (bytes[i] != wanted)
			die("byte %zu is %#x, not %#x", i, bytes[i], wanted);
	if (o->timed && (!timeline_passed(&o->timeline) ||
			 timeline_close(&o->timeline, o->src.client) < 0))
		die("the timeline: %s", o->timeline.why);
	engine_close(&o->src);
	engine_close(&o->dst);
	rig_stop(&o->rig);
}

/* The chunk is computed while it is given: with a point the new bytes must arrive,
 * without one the old ones do. */
static void chunk(bool point)
{
	struct kvd_room *send, *recv;
	struct order o;

	order_start(&o, point, false);
	order_step(&o, &o.src, 5, NEW);
	recv = room_recv(&o.dst, &o.src, 1, 3, NULL);
	send = room_send(&o.src, 1, 5, point ? &o.wait : NULL);
	if (point) {
		order_is_kept(&o, send, recv);
		hold_end(o.hold);
	}
	room_done(send, recv);
	if (!point)
		hold_end(o.hold);
	order_stop(&o, &o.dst, 3, point ? NEW : OLD);
}

/* A step that was launched before its page was freed writes it late: with a point
 * the room's bytes come after it, without one they are lost. */
static void bind(bool point)
{
	struct kvd_room *send, *recv;
	struct order o;

	order_start(&o, point, true);
	order_step(&o, &o.dst, 3, FREED);
	recv = room_recv(&o.dst, &o.src, 1, 3, point ? &o.wait : NULL);
	send = room_send(&o.src, 1, 5, NULL);
	if (point) {
		order_is_kept(&o, send, recv);
		hold_end(o.hold);
	}
	room_done(send, recv);
	if (!point)
		hold_end(o.hold);
	order_stop(&o, &o.dst, 3, point ? OLD : FREED);
}

static void chunk_word(void)
{
	chunk(true);
}

static void chunk_unordered(void)
{
	chunk(false);
}

static void bind_word(void)
{
	bind(true);
}

static void bind_unordered(void)
{
	bind(false);
}

/* Many steps on one timeline: every chunk has the bytes of its own step. */
static void chunks_in_turn(void)
{
	struct order o;

	order_start(&o, true, false);
	for (uint64_t i = 1; i <= 40; i++) {
		uint32_t page = (uint32_t)(i % 8);
		struct kvd_room *send, *recv;
		uint8_t byte = 0;

		cu(cuda.fill(o.src.base + page * PAGE, (uint8_t)i, PAGE, cuda.stream),
		   "cuMemsetD8Async");
		if (timeline_mark(&o.timeline, &o.wait) < 0)
			die("%s", o.timeline.why);
		recv = room_recv(&o.dst, &o.src, i, page, NULL);
		send = room_send(&o.src, i, page, &o.wait);
		room_done(send, recv);
		engine_get(&o.dst, page * PAGE + PAGE - 1, &byte, 1);
		if (byte != (uint8_t)i)
			die("step %ju: byte %u", (uintmax_t)i, byte);
	}
	order_stop(&o, &o.dst, 40 % 8, 40);
}

/* What of a refusal is the driver's to decide is shown, and the fake's word for it is
 * known. */
static const char *on_the_fake(const char *words)
{
	return cuda.fake ? words : "";
}

static void word_never_written(void)
{
	struct kvd_room *send, *recv;
	struct order o;

	order_start(&o, true, false);
	order_step(&o, &o.src, 5, NEW);
	room_waiting_ms = 1500;
	recv = room_recv(&o.dst, &o.src, 1, 3, NULL);
	send = room_send(&o.src, 1, 5, &o.wait);
	room_failed(send, KVD_E_TIMEOUT, "");
	room_failed(recv, KVD_E_TIMEOUT, "");
	hold_end(o.hold);
	order_stop(&o, &o.dst, 3, 0);
}

/* ---- exporters ---- */

/* Memory of this process, which ends with its input. */
int exporter_main(const char *word, const char *more)
{
	struct cu_ipc_mem memory;
	uint64_t address;
	char what;

	(void)word;
	(void)more;
	cuda_start();
	address = cuda_alloc(4 * MIB);
	cu(cuda.fill(address, NEW, 4 * MIB, cuda.stream), "cuMemsetD8Async");
	cuda_sync();
	cu(cuda.ipc_handle(&memory, address), "cuIpcGetMemHandle");
	if (write(1, &memory, sizeof(memory)) != sizeof(memory))
		return 1;
	while (read(0, &what, 1) == 1)
		continue;
	return 0;
}

static const char *said(int result)
{
	const char *name = NULL;

	return cuda.drv.error_name(result, &name) || !name ? "?" : name;
}

/* What the driver does by itself when the exporter dies: kvd's rules rest on it. */
static void exporter_dies(void)
{
	uint8_t bytes[4096] = {0};
	struct helper helper;
	struct cu_ipc_mem memory;
	uint64_t address = 0;
	int result;

	helper_start(&helper, "exporter", NULL, NULL);
	helper_hear(&helper, &memory, sizeof(memory));
	cu(cuda.drv.ipc_open(&address, memory, CU_IPC_MEM_LAZY_ENABLE_PEER_ACCESS),
	   "cuIpcOpenMemHandle");
	cu(cuda.to_host(bytes, address, sizeof(bytes)), "cuMemcpyDtoH");
	if (bytes[0] != NEW)
		die("the exporter's bytes are not seen");
	helper_kill(&helper);
	memset(bytes, 0, sizeof(bytes));
	result = cuda.to_host(bytes, address, sizeof(bytes));
	printf("    copy out of its memory: %s, %s\n", said(result),
	       bytes[0] == NEW ? "the old bytes" : "other bytes");
	printf("    cuIpcCloseMemHandle: %s\n", said(cuda.drv.ipc_close(address)));
	cu(cuda.drv.stream_sync(cuda.stream), "the context afterwards");
	printf("    the importer's context lives\n");
}

/* ---- refusals ---- */

static void refused(struct kvd_client *client, const void *handle, const char *device,
		    const char *words)
{
	const struct kvd_region_args args = {.kind = KVD_REGION_CUDA_IPC,
					     .bytes = MIB,
					     .device = device,
					     .ipc_handle = handle};
	const struct kvd_error *why;
	struct kvd_region *region = NULL;
	int r = kvd_region_register(client, &args, NULL, &region);

	why = kvd_last_error(client);
	if (r != -KVD_E_IMPORT || !strstr(why->message, words))
		die("%s \"%s\" (wanted \"%s\")", kvd_code_name(r),
		    r < 0 ? why->message : "", words);
	printf("    %s\n", why->message);
}

static void refusals(void)
{
	struct engine other, vmm;
	struct helper helper;
	struct cu_ipc_mem memory;
	struct cu_ipc_mem handle;
	struct rig rig = {0};
	int result;

	rig_start(&rig, 1, "local");
	engine_open(&other, &rig, 0, AT_GPU, MIB);
	cu(cuda.ipc_handle(&handle, other.base), "cuIpcGetMemHandle");
	refused(other.client, &handle, "MIG-0a1b2c3d", "MIG");
	refused(other.client, &handle, "GPU-00000000-0000-0000-0000-000000000000",
		cuda.uuid);
	memset(&handle, 0x5a, sizeof(handle));
	refused(other.client, &handle, cuda.uuid, on_the_fake("expandable_segments"));
	helper_start(&helper, "exporter", NULL, NULL);
	helper_hear(&helper, &memory, sizeof(memory));
	helper_kill(&helper);
	refused(other.client, &memory, cuda.uuid,
		on_the_fake("the exporting process has exited"));
	engine_open(&vmm, &rig, 0, AT_GPU_VMM, 2 * MIB);
	result = cuda.ipc_handle(&handle, vmm.base);
	printf("    cuIpcGetMemHandle of VMM memory: %s\n", said(result));
	if (result == CU_SUCCESS)
		refused(vmm.client, &handle, cuda.uuid,
			on_the_fake("expandable_segments"));
	engine_close(&vmm);
	engine_close(&other);
	rig_stop(&rig);
}

/* ---- in the middle ---- */

/* So long on a GPU, and on the fake, that the middle is not missed. */
#define LONG_ROW 256u
static uint64_t long_bytes(void)
{
	if (!cuda.fake)
		return 64 * MIB;
	setenv("FAKE_CUDA_NS_PER_KIB", "20000", 1); /* of daemons */
	return 8 * MIB;
}

/* What is seen of the transfer when it is over. */
static int xfer_over(struct kvd_xfer *xfer)
{
	int state = kvd_xfer_wait(xfer, WAIT_MS);

	if (state != KVD_FAILED && state != KVD_SUCCESS)
		die("the transfer hangs: %d", state);
	return state;
}

/* Post it, and come back after such a part of the time that it takes. */
static void under_way(const struct kvd_client *client, struct kvd_xfer *xfer,
		      double takes_s, double part)
{
	double end = clock_s() + takes_s * part;

	well(client, kvd_xfer_post(xfer, NULL, 0), "post");
	while (clock_s() < end && kvd_xfer_state(xfer) != KVD_SUCCESS)
		(void)poll(NULL, 0, 0);
}

static void still(struct engine *dst)
{
	uint8_t *bytes = need(malloc(dst->bytes));

	engine_fill(dst, 0xee);
	for (int i = 0; i < 10; i++) {
		char *text = NULL;

		well(dst->client, kvd_command(dst->client, "ping", NULL, 0, &text),
		     "ping");
		kvd_string_free(text);
		engine_get(dst, 0, bytes, dst->bytes);
		if (bytes[0] == 0xee && memcmp(bytes, bytes + 1, dst->bytes - 1) == 0)
			continue;
		for (uint64_t at = 0; at < dst->bytes; at++)
			if (bytes[at] != 0xee)
				die("byte %ju changed after the end", (uintmax_t)at);
	}
	free(bytes);
}

static void aborted(void)
{
	unsigned int canceled = 0;
	struct engine src, dst;
	struct kvd_xfer *xfer;
	struct rows rows;
	uint64_t bytes = long_bytes();
	double takes_s;
	struct rig rig = {0};

	rig_start(&rig, 2, "local");
	engine_open(&src, &rig, 0, AT_GPU, bytes);
	engine_open(&dst, &rig, 1, AT_GPU, bytes);
	engine_pattern(&src, 1);
	rows_make(&rows, LONG_ROW, bytes / LONG_ROW, bytes);
	xfer = rows_xfer(&rows, &src, &dst, true);
	(void)xfer_run(xfer);
	takes_s = xfer_run(xfer);
	printf("    whole: %.2f ms\n", takes_s * 1e3);
	for (unsigned int i = 0; i < 8; i++) {
		double begin;
		int state;

		under_way(dst.client, xfer, takes_s, 0.1 * (i + 1));
		begin = clock_s();
		well(dst.client, kvd_xfer_cancel(xfer), "stop");
		state = xfer_over(xfer);
		canceled += state == KVD_FAILED;
		if (i == 0)
			printf("    first: %s %.2f ms after it was stopped\n",
			       kvd_state_name(state), (clock_s() - begin) * 1e3);
		still(&dst);
	}
	printf("    %u of 8 were stopped in the middle\n", canceled);
	if (cuda.fake && !canceled)
		die("none was stopped in the middle");
	(void)xfer_run(xfer);
	rows_check(&rows, &src, &dst);
	engine_close(&src);
	engine_close(&dst);
	rig_stop(&rig);
}

/* what a victim tells */
struct offered {
	struct kvd_session_key key;
	char endpoint[128];
	uint64_t base, bytes;
};

/* An engine with a cache, to be killed. `word` is a daemon's folder. */
int victim_main(const char *folder, const char *bytes)
{
	struct offered out = {.bytes = strtoull(bytes, NULL, 10)};
	struct engine e;
	struct rig rig = {0};
	char what;

	snprintf(rig.dir, sizeof(rig.dir), "%s", folder);
	cuda_start();
	engine_open(&e, &rig, 0, AT_GPU, out.bytes);
	engine_pattern(&e, 3);
	well(e.client, kvd_session_key(e.client, 0, &out.key), "session.key");
	snprintf(out.endpoint, sizeof(out.endpoint), "%s",
		 kvd_daemon(e.client)->endpoint);
	out.base = e.base;
	if (write(1, &out, sizeof(out)) != sizeof(out))
		return 1;
	while (read(0, &what, 1) == 1)
		continue;
	return 0;
}

static struct kvd_xfer *read_victim(const struct engine *dst, const struct offered *from,
				    const struct rows *rows)
{
	struct kvd_xfer_args args = {.op = KVD_READ};
	uint64_t *pairs = need(calloc(rows->count, 2 * sizeof(*pairs)));
	struct kvd_dlist *lists[2];
	struct kvd_xfer *xfer = NULL;
	uint64_t attach;

	well(dst->client,
	     kvd_peer_attach(dst->client, from->endpoint, &from->key, NULL, &attach),
	     "peer.attach");
	for (int side = 0; side < 2; side++) {
		for (uint64_t i = 0; i < rows->count; i++) {
			pairs[2 * i] = side ? from->base + rows->src[i]
					    : dst->base + rows->dst[i];
			pairs[2 * i + 1] = rows->bytes;
		}
		well(dst->client,
		     kvd_dlist_prep(dst->client, side ? attach : 0, pairs, rows->count, 2,
				    &lists[side]),
		     "a list");
	}
	free(pairs);
	args.local = lists[0];
	args.remote = lists[1];
	well(dst->client, kvd_xfer_make(dst->client, &args, &xfer), "a transfer");
	return xfer;
}

static unsigned int regions(struct kvd_client *client)
{
	char *text = NULL, *at;
	unsigned int n = 0;

	well(client, kvd_command(client, "stats", NULL, 0, &text), "stats");
	at = strstr(text, "{\"name\":\"regions\""); /* not the class of accounts */
	at = at ? strstr(at, "\"value\":") : NULL;
	if (!at || sscanf(at, "\"value\":%u", &n) != 1)
		die("stats: no gauge of regions");
	kvd_string_free(text);
	return n;
}

/* kill -9 of the engine that is read: the transfer ends, its memory is let go of in
 * time, and nobody else notices. */
static void engine_killed(void)
{
	struct engine other, dst;
	struct offered from;
	struct helper victim;
	struct kvd_xfer *xfer;
	struct rows rows;
	struct rig rig = {0};
	uint64_t bytes = long_bytes();
	double begin, takes_s;
	char text[24];
	int state;

	rig_start(&rig, 2, "local");
	engine_open(&other, &rig, 0, AT_GPU, bytes);
	engine_open(&dst, &rig, 1, AT_GPU, bytes);
	rows_make(&rows, LONG_ROW, bytes / LONG_ROW, bytes);
	snprintf(text, sizeof(text), "%ju", (uintmax_t)bytes);
	helper_start(&victim, "victim", rig.dir, text);
	helper_hear(&victim, &from, sizeof(from));
	xfer = read_victim(&dst, &from, &rows);
	(void)xfer_run(xfer);
	takes_s = xfer_run(xfer);
	under_way(dst.client, xfer, takes_s, 0.3);
	begin = clock_s();
	helper_kill(&victim);
	state = xfer_over(xfer);
	printf("    %s %.1f ms after the kill, at three tenths of %.1f ms\n",
	       kvd_state_name(state), (clock_s() - begin) * 1e3, takes_s * 1e3);
	while (regions(other.client) > 1)
		if (clock_s() - begin > 2 + (cuda.fake ? 10 * takes_s : 0))
			die("its region is not closed after 2 s"); /* of a GPU's time */
	printf("    its region was closed %.1f ms after the kill, at the latest\n",
	       (clock_s() - begin) * 1e3);
	still(&dst);
	engine_pattern(&other, 4);
	(void)xfer_run(rows_xfer(&rows, &other, &dst, true));
	rows_check(&rows, &other, &dst);
	engine_close(&other);
	engine_close(&dst);
	rig_stop(&rig);
}

const struct work tests[] = {
	{"local-one-daemon", "rows of each form, GPU to GPU, one daemon",
	 local_one_daemon},
	{"local-two-daemons", "the same between two daemons, by IPC", local_two_daemons},
	{"local-from-host", "host memory to GPU", local_from_host},
	{"local-to-host", "GPU to host memory", local_to_host},
	{"local-vmm", "memory of cuMemCreate, by its fd", local_vmm},
	{"staged-shm", "GPU to GPU through shared host memory", staged_shm},
	{"staged-tcp", "GPU to GPU through TCP", staged_tcp},
	{"tensors", "sub-ranges of one allocation, as PyTorch has them",
	 tensors_of_one_allocation},
	{"order-chunk-word", "a chunk waits for a timeline", chunk_word},
	{"order-chunk-unordered", "without a wait the old bytes go", chunk_unordered},
	{"order-bind-word", "freed pages wait for a timeline", bind_word},
	{"order-bind-unordered", "without a wait the bytes are lost", bind_unordered},
	{"order-in-turn", "forty steps on one timeline", chunks_in_turn},
	{"order-word-never", "a word that never comes ends in time", word_never_written},
	{"exporter", "what the driver does when an exporter dies", exporter_dies},
	{"refusals", "handles that cannot be opened, with cause and remedy", refusals},
	{"chunks", "chunks of a cache on the GPU, put and fetched", chunks_test},
	{"gather", "selected tokens of chunks, in some layers, into GPU memory",
	 gather_test},
	{"splice", "keys of a fetch rotated in GPU memory, against the CPU's",
	 splice_test},
	{"attend", "attention, merge and splice by attend.cu, against the CPU's",
	 attend_test},
	{"attend-daemon", "a daemon attends in pages that an engine has published",
	 attend_daemon_test},
	{"attend-kill", "kill -9 of the engine whose pages are attended to",
	 attend_kill_test},
	{"attend-stream",
	 "layers posted ahead of a stream, which waits; and a daemon that dies",
	 attend_stream_test},
	{"abort", "stopped in the middle: still", aborted},
	{"kill", "kill -9 of the engine that is read", engine_killed},
	{NULL, NULL, NULL},
};
