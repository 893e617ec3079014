/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A store that finds a million chunks in its directory: how long the start takes and what
 * the index has of memory then, and what it takes to find a prompt of 512.
 *
 *     bench_files [chunks [directory]]
 *
 * Without a directory headers are made up when they are read, so what is left is the
 * store's own work and the door's; the time of making them alone is told, too. With one
 * its files are made first (eight GiB for a million chunks), and read as a daemon does.
 */
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <malloc.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <xxhash.h>

#include "daemon/base/clock.h"
#include "daemon/base/context.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/session/region.h"
#include "daemon/store/disk_impl.h"
#include "daemon/store/disk_name.h"
#include "daemon/store/files_class.h"
#include "daemon/store/files_impl.h"
#include "daemon/store/store_impl.h"

#define TOKENS 16u
#define PART_BYTES UINT64_C(4096)
#define SLOT_BYTES (SEAL_HEADER_BYTES + PART_BYTES)
#define MEMORY (UINT64_C(256) << 20)
#define PROMPT 512u
#define FINDS 20000u

/* A directory that is made up: what is written of names is kept, nothing else is. */
struct made {
	struct disk base;
	struct bench *bench;
};

struct bench {
	struct kvd kvd;
	struct config config;
	const char *dir;	/* NULL: made up */
	uint64_t chunks, slots; /* slots: of a slab */
	bool full;		/* the made-up directory has its slabs */
	struct canon *canon;
	uint8_t *memory, *part;
	struct region region; /* which is that memory */
	char name[DISK_NAME_MAX + 1];
	uint8_t digest[SEAL_DIGEST_BYTES];
	uint8_t *description;
	size_t description_len;
};

static void die(const char *what)
{
	fprintf(stderr, "bench_files: %s: %s\n", what, err_last()->text);
	exit(1);
}

static void check(int r, const char *what)
{
	if (r < 0)
		die(what);
}

static double seconds(uint64_t since)
{
	return (double)(clock_ns() - since) / 1e9;
}

/* ---- what a slot holds ---- */

static void chunk_id(uint64_t n, uint8_t id[STORE_ID_BYTES])
{
	for (uint64_t i = 0; i < STORE_ID_BYTES; i += 8) {
		uint64_t word = XXH3_64bits_withSeed(&n, sizeof(n), i);

		memcpy(id + i, &word, sizeof(word));
	}
}

static void make_header(const struct bench *b, uint64_t n, uint8_t *header)
{
	struct seal_facts facts = {.first = n % PROMPT,
				   .part_bytes = PART_BYTES,
				   .generation = n + 1,
				   .tokens = TOKENS};

	memcpy(facts.class_digest, b->digest, SEAL_DIGEST_BYTES);
	chunk_id(n, facts.id);
	seal_make(header, &facts, b->part);
}

static uint64_t chunks_in(const struct bench *b, uint64_t slab)
{
	uint64_t before = slab * b->slots;

	return before >= b->chunks	       ? 0
	       : b->chunks - before > b->slots ? b->slots
					       : b->chunks - before;
}

/* ---- a directory that is made up ---- */

static int made_list(const struct bench *b, struct disk_list *list)
{
	list->slabs = mem_calloc(ARENA_SLABS, sizeof(*list->slabs));
	list->named = mem_calloc(1, sizeof(*list->named));
	if (!list->slabs || !list->named)
		return err_pass(-ENOMEM);
	for (uint32_t i = 0; b->full && i < ARENA_SLABS && chunks_in(b, i); i++)
		list->slabs[list->slab_count++] = (struct disk_slab){
			{.slot_bytes = SLOT_BYTES, .number = i}, b->slots * SLOT_BYTES};
	if (b->full) {
		snprintf(list->named[0].name, sizeof(list->named[0].name), "%s", b->name);
		list->named[0].bytes = b->description_len;
		list->named_count = 1;
	}
	return 0;
}

static void made_submit(struct disk *base, struct disk_op *op)
{
	struct made *made = container_of(base, struct made, base);
	struct bench *b = made->bench;
	uint64_t n = op->file.number * b->slots + op->offset / SLOT_BYTES;

	switch (op->what) {
	case DISK_LIST:
		check(made_list(b, op->list), "list");
		break;
	case DISK_READ:
		if (op->offset / SLOT_BYTES < chunks_in(b, op->file.number))
			make_header(b, n, op->iov[0].iov_base);
		break;
	case DISK_NAMED_WRITE:
		snprintf(b->name, sizeof(b->name), "%s", op->name);
		b->description_len = op->iov[0].iov_len;
		b->description = mem_dup(op->iov[0].iov_base, b->description_len);
		break;
	case DISK_NAMED_READ:
		memcpy(op->iov[0].iov_base, b->description, b->description_len);
		op->moved = b->description_len;
		break;
	default:
		break;
	}
	disk_ended(base, op);
}

static void made_close(struct disk *base)
{
	(void)base;
}

static bool made_idle(const struct disk *base)
{
	(void)base;
	return true;
}

static int made_free(struct disk *base)
{
	disk_deliver(base);
	disk_fini(base);
	mem_free(container_of(base, struct made, base));
	return 0;
}

static int made_open(struct bench *b, const struct disk_args *args, struct disk **disk_p)
{
	static const struct disk_ops ops = {.submit = made_submit,
					    .close = made_close,
					    .idle = made_idle,
					    .free = made_free};
	struct made *made = mem_zalloc(sizeof(*made));

	if (!made)
		return err_pass(-ENOMEM);
	made->bench = b;
	*disk_p = &made->base;
	check(disk_init(&made->base, b->kvd.loop, &ops, args), "disk");
	disk_opened(&made->base);
	return 0;
}

/* ---- the store ---- */

static int open_disk(struct bench *b, const struct disk_args *args, struct disk **disk_p)
{
	return err_pass(b->dir ? disk_open(b->kvd.loop, args, disk_p)
			       : made_open(b, args, disk_p));
}

static void start(struct bench *b)
{
	struct disk_args args = {.path = b->dir, .on_open = files_on_open};
	struct store *store;
	struct disk *disk;

	check(store_make(&b->kvd, &store), "store");
	b->kvd.part[MODULE_STORE] = store;
	check(files_new(store, b->config.chunk_dir_bytes), "files");
	args.arg = store->files;
	check(open_disk(b, &args, &disk), "disk");
	files_begin(store->files, disk);
	sm_init(&b->region.sm, &region_table, REGION_READY);
	store->region = &b->region;
	store->base = b->memory;
	files_on_memory(store->files);
	while (!store->files->scanned) {
		loop_turn(b->kvd.loop, LOOP_NS_PER_S);
		if (store->files->readonly) {
			fprintf(stderr, "bench_files: %s\n", store->files->why.text);
			exit(1);
		}
	}
}

static void stop(struct bench *b)
{
	struct store *store = store_of(&b->kvd);

	files_close(store->files);
	while (!store_drained(store))
		loop_turn(b->kvd.loop, LOOP_NS_PER_MS);
	store_free(store);
	b->kvd.part[MODULE_STORE] = NULL;
}

static struct store_space *space_of(const struct bench *b)
{
	return list_first(&store_of(&b->kvd)->spaces, struct store_space, link);
}

static void make_class(struct bench *b, struct store_class **class_p)
{
	static const struct store_space_args args = {
		.model = "model", .scheme = "sha256", .tokens = TOKENS};
	struct account *account = account_get(&b->kvd.accounts, "uid", "1000");
	struct store_tenant *tenant;
	struct store_space *space;

	check(account ? 0 : -ENOMEM, "account");
	check(store_tenant_of(store_of(&b->kvd), account, STORE_NOW, &tenant), "tenant");
	account_unref(account);
	check(store_space_of(store_of(&b->kvd), tenant, &args, b->canon, STORE_NOW,
			     &space),
	      "space");
	check(store_class_get(space, b->canon, STORE_NOW, class_p), "class");
}

/* One part is written, for the sake of its class's description. */
static void describe(struct bench *b)
{
	uint8_t id[STORE_ID_BYTES];
	struct store_class *class;
	struct store_chunk *chunk;
	struct store_part *part;

	start(b);
	make_class(b, &class);
	chunk_id(0, id);
	check(store_chunk_get(class->space, id, 0, TOKENS, &chunk), "chunk");
	check(store_part_new(chunk, class, PART_FILLING, &part), "part");
	store_part_ready(part);
	files_write(store_of(&b->kvd)->files, part, true);
	while (part->file != PART_LASTS)
		loop_turn(b->kvd.loop, LOOP_NS_PER_S);
	memcpy(b->digest, class->words->digest, SEAL_DIGEST_BYTES);
	store_chunk_unpin(chunk);
	stop(b);
}

/* ---- a directory's files ---- */

static void fill_slab(const struct bench *b, uint32_t slab)
{
	static uint8_t header[SEAL_HEADER_BYTES];
	char path[512];
	int fd;

	snprintf(path, sizeof(path), "%s/%05" PRIu32 ".%" PRIu64 ".slab", b->dir, slab,
		 SLOT_BYTES);
	fd = open(path, O_RDWR | O_CREAT | O_TRUNC, 0600);
	if (fd < 0 || posix_fallocate(fd, 0, (off_t)(b->slots * SLOT_BYTES)) != 0)
		check(err_raise_errno(errno, "%s", path), "fill");
	for (uint64_t i = 0; i < chunks_in(b, slab); i++) {
		make_header(b, slab * b->slots + i, header);
		if (pwrite(fd, header, sizeof(header), (off_t)(i * SLOT_BYTES)) !=
		    (ssize_t)sizeof(header))
			check(err_raise_errno(errno, "%s", path), "fill");
	}
	if (fsync(fd) < 0)
		check(err_raise_errno(errno, "%s", path), "fill");
	posix_fadvise(fd, 0, 0, POSIX_FADV_DONTNEED);
	close(fd);
}

static void fill(struct bench *b)
{
	uint64_t begin = clock_ns();

	b->full = true;
	for (uint32_t i = 0; b->dir && i < ARENA_SLABS && chunks_in(b, i); i++)
		fill_slab(b, i);
	if (b->dir)
		printf("files are made in %.1f s\n", seconds(begin));
}

/* ---- figures ---- */

static void bench_start(struct bench *b)
{
	struct mallinfo2 before = mallinfo2(), after;
	uint64_t begin = clock_ns(), bytes;
	double start_s, make_s;

	start(b);
	start_s = seconds(begin);
	after = mallinfo2();
	bytes = after.uordblks + after.hblkhd - before.uordblks - before.hblkhd;
	printf("start: %" PRIu64 " chunks of %" PRIu64 " in %.2f s, %.2f us each",
	       store_of(&b->kvd)->chunk_count, b->chunks, start_s,
	       start_s * 1e6 / (double)b->chunks);
	if (!b->dir) {
		begin = clock_ns();
		for (uint64_t i = 0; i < b->chunks; i++)
			make_header(b, i, b->part + PART_BYTES);
		make_s = seconds(begin);
		printf(", of which %.2f us are the making of a header",
		       make_s * 1e6 / (double)b->chunks);
	}
	printf("\nmemory: %.1f MiB, %.0f bytes a chunk\n", (double)bytes / (1 << 20),
	       (double)bytes / (double)b->chunks);
	printf("turns of the loop: p99.9 %.2f ms, the longest %.2f ms\n",
	       (double)histogram_quantile(&loop_stats(b->kvd.loop)->busy, 999, 1000) /
		       1e6,
	       (double)histogram_quantile(&loop_stats(b->kvd.loop)->busy, 1000, 1000) /
		       1e6);
}

/* Of so many prompts from `first` on. */
static void bench_find(struct bench *b, const char *what, uint64_t first,
		       uint64_t prompts)
{
	struct store_handle handle = {.space = space_of(b), .canon = b->canon};
	static uint8_t ids[PROMPT * STORE_ID_BYTES];
	uint64_t found = 0, ns = 0;

	for (unsigned int i = 0; i < FINDS; i++) {
		uint64_t prompt = first + XXH3_64bits(&i, sizeof(i)) % prompts, begin;
		struct store_found answer;

		for (uint64_t k = 0; k < PROMPT; k++)
			chunk_id(prompt * PROMPT + k, ids + k * STORE_ID_BYTES);
		begin = clock_ns();
		store_find(&handle, &(struct store_ids){ids, PROMPT, 0}, &answer);
		ns += clock_ns() - begin;
		found += answer.chunks;
	}
	printf("find of %u, %s: %.1f us (%.0f found)\n", PROMPT, what,
	       (double)ns / 1e3 / FINDS, (double)found / FINDS);
}

static void make_canon(struct bench *b)
{
	struct layout_field field = {.name = "kv",
				     .page_stride = PART_BYTES,
				     .token_stride = PART_BYTES / TOKENS,
				     .unit_stride = PART_BYTES / TOKENS,
				     .unit_bytes = PART_BYTES / TOKENS,
				     .units = 1,
				     .total_units = 1};
	struct layout_layer layer = {.field_count = 1, .fields = &field};
	struct layout_view view = {.name = "kv",
				   .page_tokens = TOKENS,
				   .pages = 1,
				   .layer_count = 1,
				   .layers = &layer};
	uint64_t buffer = PART_BYTES;
	struct layout layout = {
		.buffer_count = 1, .buffers = &buffer, .view_count = 1, .views = &view};
	struct canon_args args = {
		.layout = &layout, .tokens = TOKENS, .memory_bytes = MEMORY};

	check(canon_make(&args, &b->canon), "canon");
}

int main(int argc, char **argv)
{
	static struct bench b;

	b.chunks = argc > 1 ? strtoull(argv[1], NULL, 10) : 1000000;
	b.dir = argc > 2 ? argv[2] : NULL;
	b.slots = (b.chunks + ARENA_SLABS - 1) / ARENA_SLABS;
	b.config.chunk_memory_bytes = MEMORY;
	snprintf(b.config.chunk_dir, sizeof(b.config.chunk_dir), "%s",
		 b.dir ? b.dir : "made up");
	b.config.chunk_dir_bytes = b.slots * SLOT_BYTES * ARENA_SLABS;
	b.kvd.config = &b.config;
	check(loop_new(&b.kvd.loop), "loop");
	b.memory = mmap(NULL, MEMORY, PROT_READ | PROT_WRITE,
			MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
	b.part = calloc(2, PART_BYTES);
	if (b.memory == MAP_FAILED || !b.part)
		check(err_raise_errno(errno, "mmap"), "memory");
	log_set_level(LOG_LEVEL_WARN);
	make_canon(&b);
	describe(&b);
	fill(&b);
	loop_free(b.kvd.loop); /* with its record of turns */
	check(loop_new(&b.kvd.loop), "loop");
	bench_start(&b);
	bench_find(&b, "any", 0, b.chunks / PROMPT);
	bench_find(&b, "one of ten", 0, 10);
	bench_find(&b, "not there", b.chunks, b.chunks / PROMPT);
	stop(&b);
	canon_free(b.canon);
	loop_free(b.kvd.loop);
	mem_free(b.description);
	free(b.part);
	munmap(b.memory, MEMORY);
	return 0;
}
