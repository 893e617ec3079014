/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Query rows for chunks that an engine has published on a GPU: the daemon attends in the
 * engine's pages. Results are held against daemon/math's fp64 kernel on the same bytes.
 *
 * The benches' times are an engine's: from the post until it sees the end.
 */
#include <math.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "daemon/math/attend.h"
#include "gpu/attend_image.h"
#include "lib/kvd_attend.h"
#include "tests/gpu/works/works.h"

#define PAGE_TOKENS 16u
#define CHUNK_TOKENS 64u
#define PAGES (CHUNK_TOKENS / PAGE_TOKENS)
#define LAYERS 2u
#define HEADS 32u
#define KV_HEADS 8u
#define DIMS 128u
#define TOKEN_BYTES ((uint64_t)KV_HEADS * DIMS * 2)
#define FIELD_BYTES (TOKEN_BYTES * PAGE_TOKENS) /* of a page */
#define CHUNKS_MAX 512u
#define TIMES 31u

static const struct attend_shape shape = {.kind = ATTEND_GQA,
					  .heads = HEADS,
					  .kv_heads = KV_HEADS,
					  .dqk = DIMS,
					  .dv = DIMS,
					  .scale = 1.5f / 11};

struct scene {
	struct rig rig;
	struct engine engine, seats; /* the cache; memory of the seats */
	struct kvd_space *space;
	struct kvd_hold *hold;
	struct kvd_attend *attend;
	struct kvd_seat seat;
	uint32_t chunks, rows;
	uint32_t pages[CHUNKS_MAX * PAGES];
	uint8_t ids[CHUNKS_MAX * KVD_CHUNK_ID_BYTES];
	uint8_t *memory; /* of the cache, on the host */
};

static uint64_t seed = 1;

static void fill(uint16_t *to, uint64_t count)
{
	for (uint64_t i = 0; i < count; i++) {
		seed = seed * UINT64_C(6364136223846793005) +
		       UINT64_C(1442695040888963407);
		to[i] = value_to_bf16((float)(seed >> 44) / (1 << 18) - 2);
	}
}

static struct kvd_chunks chunks_of(const struct scene *s)
{
	return (struct kvd_chunks){.ids = s->ids, .count = s->chunks};
}

/* ---- the cache, and what is published of it ---- */

static void cache_pool(struct engine *e, uint32_t pages)
{
	struct kvd_layout *layout = need(kvd_layout_new(0));
	struct kvd_pool_args args = {.regions = &e->region, .region_count = 1};
	uint32_t buffer = kvd_layout_buffer(layout, e->bytes);
	uint32_t view = kvd_layout_view(layout, "kv", PAGE_TOKENS, pages);

	for (uint32_t i = 0; i < 2 * LAYERS; i++) {
		const struct kvd_field field = {.name = i % 2 ? "v" : "k",
						.buffer = buffer,
						.offset = i * FIELD_BYTES * pages,
						.unit_bytes = DIMS * 2,
						.units = KV_HEADS};

		kvd_layout_heads(layout, view, i / 2, KVD_NHD, &field);
	}
	well(NULL, kvd_layout_text(layout, &args.layout), "the layout");
	well(e->client, kvd_pool_register(e->client, &args, NULL, &e->pool),
	     "pool.register");
	kvd_layout_free(layout);
}

static void move_ends(struct scene *s, struct kvd_move *move, const char *what)
{
	const struct timespec pause = {.tv_nsec = 100000};
	double until = clock_s() + 30;
	int state;

	while ((state = kvd_move_state(move)) != KVD_SUCCESS) {
		if (state < 0 || state == KVD_FAILED || clock_s() > until)
			die("%s: state %d", what, state);
		nanosleep(&pause, NULL);
	}
	well(s->engine.client, kvd_move_close(move, NULL), what);
}

static void scene_publish(struct scene *s)
{
	const struct kvd_chunks chunks = chunks_of(s);
	struct kvd_view view = {.pages = s->pages, .page_count = s->chunks * PAGES};
	struct kvd_move_args args = {
		.pool = s->engine.pool, .views = &view, .view_count = 1};
	struct kvd_move *move = NULL;

	well(s->engine.client, kvd_publish(s->space, &chunks, &args, NULL, &move),
	     "chunk.publish");
	move_ends(s, move, "chunk.publish");
}

static void scene_hold(struct scene *s)
{
	const struct kvd_chunks chunks = chunks_of(s);

	well(s->engine.client,
	     kvd_hold_open(s->space, &chunks, 60000, 0, WAIT_MS, &s->hold), "chunk.hold");
}

/* Without nvcc the tests' driver takes an image by name. */
static const char *config_of(struct rig *rig, unsigned int share)
{
	static char more[256];
	char path[128] = "";
	size_t bytes;
	FILE *file;

	rig_folder(rig);
	if (!attend_image(&bytes)) {
		if (!cuda.fake)
			skip("kvd of a build with nvcc");
		snprintf(path, sizeof(path), "%s/image", rig->dir);
		file = need(fopen(path, "we"));
		fputs("kvd fake kernels\n", file);
		fclose(file);
	}
	snprintf(more, sizeof(more),
		 "%s%s\n[chunks]\nchunk_memory = 64 MiB\nattention_gpu_share = %u\n",
		 path[0] ? "gpu_kernels = " : "", path, share);
	return more;
}

static void space_open(struct scene *s)
{
	const struct kvd_space_args args = {.model = "works",
					    .scheme = "numbers",
					    .tokens = CHUNK_TOKENS,
					    .pool = s->engine.pool};
	double until = clock_s() + 30;
	int r;

	do { /* the daemon's memory is being made */
		r = kvd_space_open(s->engine.client, &args, NULL, &s->space);
	} while (r == -KVD_E_BUSY && clock_s() < until);
	well(s->engine.client, r, "space.open");
}

/* In the memory of a client of its own, whose session is the cache's. */
static void seats_open(struct scene *s)
{
	struct kvd_attend_args args = {.rows = s->rows,
				       .seats = LAYERS,
				       .kind = KVD_GQA,
				       .heads = HEADS,
				       .kv_heads = KV_HEADS,
				       .dqk = DIMS,
				       .dv = DIMS,
				       .scale = shape.scale,
				       .key = "k",
				       .value = "v"};

	engine_memory(&s->seats, AT_HOST,
		      LAYERS * ((uint64_t)s->rows * (DIMS * 6 + 8) + 4096));
	args.address = s->seats.memory.address;
	s->seats.client = s->engine.client;
	well(s->seats.client, engine_register(&s->seats), "region.register");
	args.region = s->seats.region;
	well(s->engine.client, kvd_attend_open(s->engine.client, &args, NULL, &s->attend),
	     "attention.open");
	well(s->engine.client, kvd_attend_seat(s->attend, &s->seat), "the seat");
}

/* An engine with the cache, whose chunks are not published yet. */
static void scene_engine(struct scene *s)
{
	const uint32_t chunks = s->chunks;
	const uint64_t bytes = 2 * LAYERS * FIELD_BYTES * chunks * PAGES;

	s->memory = need(aligned_alloc(64, bytes));
	fill((uint16_t *)(void *)s->memory, bytes / 2);
	engine_open(&s->engine, &s->rig, 0, AT_GPU, bytes);
	engine_put(&s->engine, 0, s->memory, bytes);
	cache_pool(&s->engine, chunks * PAGES);
	for (uint32_t i = 0; i < chunks * PAGES; i++) /* in reverse */
		s->pages[i] = chunks * PAGES - 1 - i;
	for (uint32_t i = 0; i < chunks; i++)
		memcpy(&s->ids[(size_t)i * KVD_CHUNK_ID_BYTES], &i, sizeof(i));
	space_open(s);
}

static void scene_start(struct scene *s, uint32_t chunks, uint32_t rows,
			unsigned int share)
{
	*s = (struct scene){.chunks = chunks, .rows = rows};
	s->rig.more = config_of(&s->rig, share);
	rig_start(&s->rig, 1, "local shm");
	scene_engine(s);
	seats_open(s);
}

static void scene_open(struct scene *s, uint32_t chunks, uint32_t rows,
		       unsigned int share)
{
	scene_start(s, chunks, rows, share);
	scene_publish(s);
	scene_hold(s);
}

static void scene_close(struct scene *s)
{
	well(s->engine.client, kvd_hold_close(s->hold, NULL), "hold.close");
	well(s->engine.client, kvd_attend_close(s->attend, NULL), "attention.close");
	well(s->engine.client, kvd_region_unregister(s->seats.region, NULL),
	     "region.unregister");
	kvd_memory_free(&s->seats.memory);
	well(s->engine.client, kvd_space_close(s->space, NULL), "space.close");
	engine_close(&s->engine);
	rig_stop(&s->rig);
	free(s->memory);
}

/* ---- rows ---- */

static uint8_t *seat_at(struct scene *s, uint64_t offset)
{
	return (uint8_t *)s->seats.memory.address + offset;
}

/* Its seconds; negative: the code of its failure. */
static double ask(struct scene *s, uint32_t layer, uint32_t rows)
{
	const struct kvd_part part = {.hold = s->hold, .rows = rows, .count = s->chunks};
	double begin = clock_s();
	struct kvd_error why = {0};
	int state;

	well(s->engine.client, kvd_attend_post(s->attend, 0, layer, &part, 1, 30000000),
	     "a post");
	while ((state = kvd_attend_state(s->attend, 0)) != KVD_SUCCESS &&
	       state != KVD_FAILED)
		if (clock_s() > begin + 40)
			die("the rows hang");
	if (state == KVD_SUCCESS)
		return clock_s() - begin;
	well(s->engine.client, kvd_attend_error(s->attend, 0, 5000, &why), "the error");
	printf("    %s: %s\n", kvd_code_name(why.code), why.message);
	return -why.code;
}

/* `o` and the rows that it is of. */
static void check(struct scene *s, uint32_t layer, uint32_t rows, const void *q,
		  const float *o)
{
	struct attend_field k = {.base = s->memory +
					 2ull * layer * FIELD_BYTES * s->chunks * PAGES,
				 .page_stride = FIELD_BYTES,
				 .token_stride = TOKEN_BYTES,
				 .head_stride = DIMS * 2};
	struct attend_kv kv = {.k = k,
			       .v = k,
			       .pages = s->pages,
			       .page_tokens = PAGE_TOKENS,
			       .tokens = s->chunks * CHUNK_TOKENS};
	struct attend_span want = {.q = q,
				   .o = need(calloc(rows, DIMS * 4)),
				   .m = need(calloc(rows, 4)),
				   .l = need(calloc(rows, 4)),
				   .rows = rows,
				   .end = kv.tokens};
	const struct attend_job job = {
		.shape = &shape, .kv = &kv, .spans = &want, .span_count = 1};
	void *scratch = need(
		aligned_alloc(64, (attend_scratch_bytes(&shape, rows) + 63) / 64 * 64));
	double off = 0, all = 0;

	kv.v.base += FIELD_BYTES * s->chunks * PAGES;
	(void)attend_run(PICK_REF, &job, scratch);
	for (uint64_t i = 0; i < (uint64_t)rows * DIMS; i++) {
		off += ((double)o[i] - (double)want.o[i]) *
		       ((double)o[i] - (double)want.o[i]);
		all += (double)want.o[i] * (double)want.o[i];
	}
	if (!(sqrt(off / all) <= 2e-3))
		die("o: rms %.1e of fp64's, over 2e-3", sqrt(off / all));
	free(want.o);
	free(want.m);
	free(want.l);
	free(scratch);
}

static void check_seat(struct scene *s, uint32_t layer)
{
	check(s, layer, s->rows, seat_at(s, s->seat.q),
	      (const float *)(const void *)seat_at(s, s->seat.o));
}

void attend_daemon_test(void)
{
	struct kvd_move *move = NULL;
	struct kvd_chunks chunks;
	struct scene s;

	scene_open(&s, cuda.fake ? 2 : 40, 2 * HEADS, 100);
	chunks = chunks_of(&s);
	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		fill((uint16_t *)(void *)seat_at(&s, s.seat.q), (uint64_t)s.rows * DIMS);
		if (ask(&s, layer, s.rows) < 0)
			die("the rows failed");
		check_seat(&s, layer);
	}
	well(s.engine.client, kvd_withdraw(s.space, &chunks, 0, NULL, &move),
	     "chunk.withdraw");
	move_ends(&s, move, "chunk.withdraw");
	if (ask(&s, 0, s.rows) >= 0)
		die("rows for withdrawn pages succeeded");
	scene_close(&s);
}

int publisher_main(const char *dir, const char *chunks)
{
	struct scene s = {.chunks = (uint32_t)atoi(chunks)};
	char byte = 0;

	cuda_start();
	snprintf(s.rig.dir, sizeof(s.rig.dir), "%s", dir);
	scene_engine(&s);
	scene_publish(&s);
	if (write(1, &byte, 1) == 1)
		(void)!read(0, &byte, 1); /* until it is killed */
	return 0;
}

/* kill -9 of the engine whose pages are attended to: the rows fail, and another engine's
 * are attended to on the same device. */
void attend_kill_test(void)
{
	const uint32_t chunks = cuda.fake ? 2 : 40;
	struct helper publisher;
	unsigned int n = 0;
	char text[16], byte;
	struct scene s;
	double begin;

	scene_start(&s, chunks, HEADS, 100);
	fill((uint16_t *)(void *)seat_at(&s, s.seat.q), (uint64_t)s.rows * DIMS);
	snprintf(text, sizeof(text), "%u", chunks);
	helper_start(&publisher, "publisher", s.rig.dir, text);
	helper_hear(&publisher, &byte, 1);
	scene_hold(&s);
	for (unsigned int i = 0; i < 3; i++)
		if (ask(&s, 0, s.rows) < 0)
			die("the rows failed");
	helper_kill(&publisher);
	begin = clock_s();
	for (; ask(&s, 0, s.rows) >= 0; n++)
		if (clock_s() > begin + 30)
			die("its pages are attended to 30 s after the kill");
	printf("    %u posts succeeded in %.1f ms after the kill\n", n,
	       (clock_s() - begin) * 1e3);
	well(s.engine.client, kvd_hold_close(s.hold, NULL), "hold.close");
	scene_publish(&s);
	scene_hold(&s);
	if (ask(&s, 1, s.rows) < 0)
		die("the rows of another engine's pages failed");
	check_seat(&s, 1);
	scene_close(&s);
}

/* ---- queries that a stream computes ---- */

/* Both on the device, of all layers. */
struct stream_rows {
	uint64_t q, o, seats; /* seats: the host's, as the device sees them */
	uint64_t q_bytes, o_bytes;
};

/* The layer's queries go to a seat, and its results from there, in the stream's turn. */
static void stream_order(struct scene *s, const struct stream_rows *at, uint32_t layer,
			 uint32_t deadline_us)
{
	const struct kvd_part part = {
		.hold = s->hold, .rows = s->rows, .count = s->chunks};
	uint64_t seat = at->seats + layer * s->seat.bytes, value;

	cu(cuda.drv.copy(seat + s->seat.q, at->q + layer * at->q_bytes, at->q_bytes,
			 cuda.stream),
	   "cuMemcpyAsync");
	well(s->engine.client,
	     kvd_attend_order(s->attend, layer, layer, &part, 1, deadline_us, &value),
	     "an ordered post");
	cu(cuda.stream_write(cuda.stream, seat + s->seat.ready, value, 0),
	   "cuStreamWriteValue64");
	cu(cuda.stream_wait(cuda.stream, seat + s->seat.done, value, 0),
	   "cuStreamWaitValue64");
	cu(cuda.drv.copy(at->o + layer * at->o_bytes, seat + s->seat.o, at->o_bytes,
			 cuda.stream),
	   "cuMemcpyAsync");
}

static void stream_open(struct scene *s, struct stream_rows *at)
{
	*at = (struct stream_rows){.q_bytes = (uint64_t)s->rows * DIMS * 2,
				   .o_bytes = (uint64_t)s->rows * DIMS * 4};
	at->q = cuda_alloc(LAYERS * at->q_bytes);
	at->o = cuda_alloc(LAYERS * at->o_bytes);
	cu(cuda.drv.host_register(s->seats.memory.address, s->seats.memory.bytes,
				  CU_MEMHOSTREGISTER_PORTABLE |
					  CU_MEMHOSTREGISTER_DEVICEMAP),
	   "cuMemHostRegister");
	cu(cuda.host_address(&at->seats, s->seats.memory.address, 0),
	   "cuMemHostGetDevicePointer");
}

static void stream_check(struct scene *s, const struct stream_rows *at, const uint16_t *q)
{
	float *o = need(malloc(at->o_bytes));

	for (uint32_t layer = 0; layer < LAYERS; layer++) {
		if (kvd_attend_state(s->attend, layer) != KVD_SUCCESS)
			die("layer %u: state %d", layer,
			    kvd_attend_state(s->attend, layer));
		cu(cuda.to_host(o, at->o + layer * at->o_bytes, at->o_bytes),
		   "cuMemcpyDtoH");
		check(s, layer, s->rows, q + layer * at->q_bytes / 2, o);
	}
	free(o);
}

/* All layers are posted ahead of the stream; then the daemon is killed while the stream
 * waits for it. */
void attend_stream_test(void)
{
	struct stream_rows at;
	struct hold *hold;
	struct scene s;
	uint16_t *q;
	double begin;

	scene_open(&s, cuda.fake ? 2 : 40, 2 * HEADS, 100);
	stream_open(&s, &at);
	q = need(malloc(LAYERS * at.q_bytes));
	for (unsigned int turn = 0; turn < 3; turn++) {
		fill(q, LAYERS * at.q_bytes / 2);
		cu(cuda.to_device(at.q, q, LAYERS * at.q_bytes), "cuMemcpyHtoD");
		cu(cuda.drv.stream_sync(NULL), "cuStreamSynchronize");
		hold = hold_begin(cuda.stream);
		for (uint32_t layer = 0; layer < LAYERS; layer++)
			stream_order(&s, &at, layer, 30000000);
		hold_end(hold);
		cuda_sync();
		stream_check(&s, &at, q);
	}
	hold = hold_begin(cuda.stream);
	stream_order(&s, &at, 0, 60000000);
	kill(s.rig.pids[0], SIGKILL);
	(void)waitpid(s.rig.pids[0], NULL, 0);
	s.rig.pids[0] = 0;
	hold_end(hold);
	begin = clock_s();
	cuda_sync();
	printf("    the stream went on %.1f ms after its daemon's end\n",
	       (clock_s() - begin) * 1e3);
	if (clock_s() - begin > 30 || kvd_attend_state(s.attend, 0) != KVD_FAILED)
		die("the stream waited for its deadline, or the request has not failed");
	free(q);
	cu(cuda.drv.host_unregister(s.seats.memory.address), "cuMemHostUnregister");
	kvd_close(s.engine.client);
	rig_stop(&s.rig);
}

/* ---- times ---- */

static int by_value(const void *a, const void *b)
{
	double x = *(const double *)a, y = *(const double *)b;

	return x < y ? -1 : x > y;
}

static void bench_rows(struct scene *s, uint32_t rows)
{
	const unsigned int times = cuda.fake ? 1 : TIMES;
	struct kvd_attend_facts facts;
	double took[TIMES];

	for (unsigned int i = 0; i < times; i++) {
		took[i] = ask(s, i % LAYERS, rows);
		if (took[i] < 0)
			die("the rows failed");
	}
	well(s->engine.client, kvd_attend_read(s->attend, 0, &facts), "the facts");
	qsort(took, times, sizeof(*took), by_value);
	printf("  %5u tokens %4u rows: %8.1f us in the median, %8.1f us the slowest; of "
	       "the last %ju us in the call, %ju us before it\n",
	       s->chunks * CHUNK_TOKENS, rows, took[times / 2] * 1e6,
	       took[times - 1] * 1e6, (uintmax_t)facts.attend_us,
	       (uintmax_t)facts.queue_us);
}

void attend_daemon_bench(void)
{
	struct scene s;

	for (uint32_t tokens = 2048; tokens <= 32768; tokens *= 4) {
		const uint32_t chunks = tokens / shrink() / CHUNK_TOKENS;

		if (cuda.fake && tokens > 2048)
			break;
		scene_open(&s, chunks ? chunks : 1, 8 * HEADS, 100);
		fill((uint16_t *)(void *)seat_at(&s, s.seat.q), (uint64_t)s.rows * DIMS);
		bench_rows(&s, HEADS);
		if (!cuda.fake)
			bench_rows(&s, 8 * HEADS);
		scene_close(&s);
	}
}

/* Rows of one query token, one post behind the other. */
static void bench_beside(unsigned int share, uint32_t chunks)
{
	const double window = cuda.fake ? 0.1 : 2;
	double begin, alone, beside;
	struct helper busy;
	unsigned int n = 0;
	struct scene s;

	scene_open(&s, chunks, HEADS, share);
	fill((uint16_t *)(void *)seat_at(&s, s.seat.q), (uint64_t)s.rows * DIMS);
	if (ask(&s, 0, HEADS) < 0) /* loads, and allocates */
		die("the rows failed");
	helper_start(&busy, "busy", NULL, NULL);
	(void)busy_rate(&busy, clock_s());
	begin = clock_s();
	busy_while(window);
	alone = busy_rate(&busy, begin);
	begin = clock_s();
	for (; n == 0 || clock_s() < begin + window; n++)
		if (ask(&s, n % LAYERS, HEADS) < 0)
			die("the rows failed");
	beside = busy_rate(&busy, begin);
	printf("  share %3u: %8.1f us a post; the busy process ran %.0f kernels a "
	       "second, %.0f alone: %.2f\n",
	       share, (clock_s() - begin) / n * 1e6, beside, alone, beside / alone);
	helper_kill(&busy);
	scene_close(&s);
}

void busy_attend_bench(void)
{
	static const unsigned int shares[] = {5, 10, 25, 100};
	const uint32_t chunks = 8192 / shrink() / CHUNK_TOKENS;

	for (unsigned int i = cuda.fake ? 2 : 0; i < ARRAY_LEN(shares); i++)
		bench_beside(shares[i], chunks ? chunks : 1);
}
