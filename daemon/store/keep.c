/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The index is a mapped file next to the memory: a head, descriptions of classes, and a
 * record for each address where a slot may start; records that were never written use no
 * memory. A record is written when its part is ready and erased before its slot is freed;
 * a process that dies in between has done the first step of its program, so a record
 * implies valid bytes. Its checksum covers itself and its place: a torn record, or one of
 * another slot size, is invalid.
 *
 * A class's description stays in its place, because records refer to it by number. Once
 * its last part is freed, and the store has dropped the class, no record refers to it,
 * and its place is reused when there is no other.
 *
 * Bytes of memory have no sums. A stray write by a process before it crashes is not
 * detected here, as it would not be in engines' memory.
 *
 * A process that crashes again and again on the memory that it was given gives it up at
 * the third time.
 */
#include "daemon/store/keep.h"

#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include <xxhash.h>

#include "daemon/base/context.h"
#include "daemon/base/idmap.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/loop/notify.h"
#include "daemon/store/files_class.h"
#include "daemon/store/store_impl.h"

#define MEMORY_NAME "kvd-chunks"
#define INDEX_NAME "kvd-chunks-index"
#define MAGIC UINT64_C(0x316b706565646b76)
#define VERSION 1u
#define TRIES_MAX 2u
#define HEAD_BYTES UINT64_C(65536)
#define CLASSES_BYTES (UINT64_C(16) << 20)
#define CLASS_ALIGN 64u
#define NO_CLASS UINT64_MAX
#define KEPT_NOT UINT32_MAX /* store_class.kept: no room for it */

struct keep_slab {
	uint64_t slot_bytes;
	uint64_t used; /* records up to here may be written */
};

struct keep_head {
	uint64_t magic;
	uint32_t version, tries;
	uint64_t memory_bytes;
	uint64_t class_bytes; /* of the classes' part that are used */
	struct keep_slab slabs[ARENA_SLABS];
};

/* The description of a class, in the classes' part; its offset plus one is its number
 * there. */
struct keep_class {
	uint64_t sum; /* of the content */
	uint64_t len;
	uint8_t content[];
};

struct keep_record {
	uint64_t sum; /* of the rest and its place; 0: none */
	uint64_t first;
	uint32_t tokens, class;
	uint8_t id[STORE_ID_BYTES];
	uint64_t zero;
};

struct keep {
	struct part_observer observer;
	struct store *store;
	struct idmap restored; /* while it restores: classes by number; or &refused */
	bool full;	       /* logged once */
	uint64_t slab_records; /* of a slab */
	size_t map_bytes;
	struct keep_head *head;
	uint8_t *classes;
	struct keep_record *records;
};

_Static_assert(sizeof(struct keep_record) == 64, "a record is a line of the cache");
_Static_assert(sizeof(struct keep_head) <= HEAD_BYTES, "the head has its room");

static void on_ready(struct part_observer *observer, const struct store_part *part);
static void on_gone(struct part_observer *observer, const struct store_part *part);

/* ---- files ---- */

static uint64_t index_bytes(const struct keep *keep)
{
	return HEAD_BYTES + CLASSES_BYTES +
	       ARENA_SLABS * keep->slab_records * sizeof(struct keep_record);
}

static int keep_map(struct keep *keep, int fd)
{
	void *map = mmap(NULL, keep->map_bytes, PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_NORESERVE, fd, 0);

	if (map == MAP_FAILED)
		return err_raise_errno(errno, "mapping the index of chunks");
	keep->head = map;
	keep->classes = (uint8_t *)map + HEAD_BYTES;
	keep->records = (struct keep_record *)(void *)(keep->classes + CLASSES_BYTES);
	return 0;
}

static void keep_unmap(struct keep *keep)
{
	if (keep->head)
		munmap(keep->head, keep->map_bytes);
	keep->head = NULL;
}

/* A memfd of this size that cannot shrink under its mapping? */
static bool fd_fits(int fd, uint64_t bytes)
{
	struct stat st;

	return fd >= 0 && fstat(fd, &st) == 0 && st.st_size == (off_t)bytes &&
	       fcntl(fd, F_GET_SEALS) >= 0 && (fcntl(fd, F_GET_SEALS) & F_SEAL_SHRINK);
}

static int fd_make(const char *name, uint64_t bytes, int *fd_p)
{
	int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);

	if (fd < 0)
		return err_raise_errno(errno, "memfd_create");
	if (ftruncate(fd, (off_t)bytes) < 0 ||
	    fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW) < 0) {
		int r = err_raise_errno(errno, "chunk_memory: a file of %ju bytes",
					(uintmax_t)bytes);

		close(fd);
		return err_pass(r);
	}
	*fd_p = fd;
	return 0;
}

/* Takes over those of the previous process, with as much memory and the same index. */
static bool keep_takes(struct keep *keep, int memory, int index)
{
	const struct keep_head *head;

	if (!fd_fits(memory, keep->store->memory_bytes) ||
	    !fd_fits(index, index_bytes(keep)))
		return false;
	if (keep_map(keep, index) < 0) {
		err_clear();
		return false;
	}
	head = keep->head;
	if (head->magic == MAGIC && head->version == VERSION &&
	    head->memory_bytes == keep->store->memory_bytes &&
	    head->class_bytes <= CLASSES_BYTES && head->tries < TRIES_MAX) {
		log_info("store", NULL, "takes over the memory of the previous process",
			 "bytes=%ju", (uintmax_t)head->memory_bytes);
		return true;
	}
	log_warn("store", NULL, "the memory kept by systemd is not used",
		 "version=%u tries=%u", head->version, head->tries);
	keep_unmap(keep);
	return false;
}

static int keep_make(struct keep *keep, int *memory_p)
{
	cleanup_close int memory = -1, index = -1;
	int r = fd_make(MEMORY_NAME, keep->store->memory_bytes, &memory);

	if (r >= 0)
		r = fd_make(INDEX_NAME, index_bytes(keep), &index);
	if (r >= 0)
		r = keep_map(keep, index);
	if (r < 0)
		return err_pass(r);
	keep->head->version = VERSION;
	keep->head->memory_bytes = keep->store->memory_bytes;
	keep->head->magic = MAGIC;
	notify_forget_fd(MEMORY_NAME);
	notify_forget_fd(INDEX_NAME);
	notify_keep_fd(MEMORY_NAME, memory);
	notify_keep_fd(INDEX_NAME, index);
	*memory_p = mem_steal_fd(&memory);
	return 0;
}

int keep_new(struct store *store, int *fd_p, struct keep **keep_p)
{
	cleanup_close int memory = notify_kept_fd(MEMORY_NAME);
	cleanup_close int index = notify_kept_fd(INDEX_NAME);
	struct keep *keep;
	int r = 0;

	*keep_p = NULL;
	if (!notify_keeps())
		return err_pass(fd_make(MEMORY_NAME, store->memory_bytes, fd_p));
	keep = mem_zalloc(sizeof(*keep));
	if (!keep)
		return err_pass(-ENOMEM);
	keep->observer = (struct part_observer){on_ready, on_gone};
	keep->store = store;
	keep->slab_records = store->memory_bytes / ARENA_SLABS / CANON_GRAIN;
	keep->map_bytes = index_bytes(keep);
	if (keep_takes(keep, memory, index))
		*fd_p = mem_steal_fd(&memory);
	else
		r = keep_make(keep, fd_p);
	if (r < 0) {
		keep_free(keep);
		return err_pass(r);
	}
	keep->head->tries++;
	store->observer = &keep->observer;
	*keep_p = keep;
	return 0;
}

void keep_free(struct keep *keep)
{
	if (!keep)
		return;
	keep->store->observer = NULL;
	keep_unmap(keep);
	mem_free(keep);
}

void keep_settled(struct keep *keep)
{
	if (keep)
		keep->head->tries = 0;
}

/* ---- classes ---- */

static struct keep_class *class_at(const struct keep *keep, uint64_t at)
{
	struct keep_class *class = (void *)(keep->classes + at);
	uint64_t end = keep->head->class_bytes;

	if (at % CLASS_ALIGN || at > end || end - at < sizeof(*class) ||
	    class->len > end - at - sizeof(*class))
		return NULL;
	return class;
}

static uint64_t class_next(uint64_t at, uint64_t len)
{
	return (at + sizeof(struct keep_class) + len + CLASS_ALIGN - 1) / CLASS_ALIGN *
	       CLASS_ALIGN;
}

/* The place of that very content; NO_CLASS: none. */
static uint64_t class_find(const struct keep *keep, const uint8_t *content, size_t len,
			   uint64_t sum)
{
	const struct keep_class *class;

	for (uint64_t at = 0; (class = class_at(keep, at));
	     at = class_next(at, class->len)) {
		if (class->sum == sum && class->len == len &&
		    memcmp(class->content, content, len) == 0)
			return at;
	}
	return NO_CLASS;
}

static int classes_in(const struct list *spaces, struct idmap *known)
{
	const struct store_space *space;
	int r = 0;

	list_foreach(space, spaces, link) {
		for (unsigned int i = 0; i < STORE_CLASSES_MAX && r >= 0; i++) {
			struct store_class *class = space->classes[i];

			if (class && class->kept && !idmap_get(known, class->kept))
				r = idmap_put(known, class->kept, class);
		}
	}
	return r < 0 ? err_pass(r) : 0;
}

/* Space for `len` in place of classes that the store does not know: these have no valid
 * records. The remainder becomes one without a sum, before the first one's length is
 * changed. */
static uint64_t class_reuse(const struct keep *keep, size_t len)
{
	uint64_t from = 0, at = 0, end;
	struct idmap known = {0};
	struct keep_class *class, *rest;

	if (classes_in(&keep->store->spaces, &known) < 0 ||
	    classes_in(&keep->store->going, &known) < 0) { /* they may have records yet */
		err_clear();
		idmap_fini(&known);
		return NO_CLASS;
	}
	while ((class = class_at(keep, at)) && at < from + class_next(0, len)) {
		at = class_next(at, class->len);
		if (idmap_get(&known, (uint64_t)((uint8_t *)class - keep->classes) + 1))
			from = at;
	}
	idmap_fini(&known);
	end = from + class_next(0, len);
	if (at < end || at > keep->head->class_bytes)
		return NO_CLASS;
	if (at > end) {
		rest = (void *)(keep->classes + end);
		rest->sum = 0;
		rest->len = at - end - sizeof(*rest);
	}
	return from;
}

static void class_write(struct keep *keep, uint64_t at, const uint8_t *content,
			size_t len, uint64_t sum)
{
	struct keep_class *class = (void *)(keep->classes + at);

	__atomic_store_n(&class->sum, 0, __ATOMIC_SEQ_CST);
	__atomic_store_n(&class->len, len, __ATOMIC_SEQ_CST);
	memcpy(class->content, content, len);
	__atomic_store_n(&class->sum, sum, __ATOMIC_RELEASE);
	if (class_next(at, len) > keep->head->class_bytes)
		__atomic_store_n(&keep->head->class_bytes, class_next(at, len),
				 __ATOMIC_RELEASE);
}

static uint64_t class_add(struct keep *keep, const uint8_t *content, size_t len,
			  uint64_t sum)
{
	uint64_t at = keep->head->class_bytes;

	if (class_next(at, len) > CLASSES_BYTES)
		at = class_reuse(keep, len);
	if (at != NO_CLASS)
		class_write(keep, at, content, len, sum);
	else if (!keep->full)
		log_warn("store", NULL,
			 "too many kinds of chunks for a restart: chunks of the latest "
			 "kinds will not survive it",
			 "bytes=%llu", (unsigned long long)CLASSES_BYTES);
	keep->full |= at == NO_CLASS;
	return at;
}

/* The number of it in records; 0: no space until all are written again. */
static uint32_t class_number(struct keep *keep, struct store_class *of)
{
	cleanup_free uint8_t *content = NULL;
	uint64_t at, sum;
	size_t len;

	if (of->kept)
		return of->kept == KEPT_NOT ? 0 : of->kept;
	if (class_words_print(of, &content, &len) < 0) {
		err_clear(); /* its parts are not kept */
		return 0;
	}
	sum = XXH3_64bits(content, len);
	at = class_find(keep, content, len, sum);
	if (at == NO_CLASS)
		at = class_add(keep, content, len, sum);
	of->kept = at == NO_CLASS ? KEPT_NOT : (uint32_t)at + 1;
	return at == NO_CLASS ? 0 : of->kept;
}

static int class_restore(const struct keep *keep, uint32_t number,
			 struct store_class **class_p)
{
	const struct keep_class *kept = number ? class_at(keep, number - 1) : NULL;
	int r;

	if (!kept || XXH3_64bits(kept->content, kept->len) != kept->sum)
		return err_raise(ERR_PROTO, "unknown class");
	r = class_words_scan(keep->store, kept->content, kept->len, 0, class_p);
	if (r >= 0 && (*class_p)->kept)
		r = err_raise(ERR_PROTO, "duplicate class"); /* one is reused */
	if (r >= 0)
		(*class_p)->kept = number;
	return err_pass(r);
}

/* Each number is read once: records of many classes are interleaved. */
static int class_restored(struct keep *keep, uint32_t number,
			  struct store_class **class_p)
{
	static struct store_class refused;
	struct store_class *class = idmap_get(&keep->restored, number);
	int r;

	if (class == &refused)
		return err_raise(ERR_PROTO, "refused class");
	*class_p = class;
	if (class)
		return 0;
	r = class_restore(keep, number, class_p);
	if (idmap_put(&keep->restored, number, r < 0 ? &refused : *class_p) < 0)
		err_clear(); /* it is read again */
	return r < 0 ? err_raise(ERR_PROTO, "refused class") : 0;
}

/* ---- records ---- */

static uint64_t record_sum(const struct keep_record *record, uint64_t slot_bytes,
			   uint64_t place)
{
	uint64_t sum = XXH3_64bits_withSeed(
		&record->first, sizeof(*record) - sizeof(record->sum),
		slot_bytes ^ place * UINT64_C(0x9e3779b97f4a7c15));

	return sum ? sum : 1;
}

static struct keep_record *record_of(const struct keep *keep,
				     const struct arena_slot *slot, uint64_t *place_p)
{
	*place_p = arena_slab_of(slot) * keep->slab_records + slot->index;
	return &keep->records[*place_p];
}

static void on_ready(struct part_observer *observer, const struct store_part *part)
{
	struct keep *keep = container_of(observer, struct keep, observer);
	struct keep_record *record;
	struct keep_slab *slab;
	uint32_t number = class_number(keep, part->class);
	uint64_t place, slot_bytes;

	if (!number)
		return;
	record = record_of(keep, &part->slot, &place);
	slab = &keep->head->slabs[arena_slab_of(&part->slot)];
	slot_bytes = arena_slab_size(keep->store->arena, arena_slab_of(&part->slot));
	if (slab->slot_bytes != slot_bytes)
		*slab = (struct keep_slab){.slot_bytes = slot_bytes};
	if (slab->used <= part->slot.index)
		slab->used = part->slot.index + 1;
	record->first = part->chunk->first;
	record->tokens = part->chunk->tokens;
	record->class = number;
	memcpy(record->id, part->chunk->id, STORE_ID_BYTES);
	__atomic_store_n(&record->sum, record_sum(record, slot_bytes, place),
			 __ATOMIC_RELEASE);
}

/* Threads write its slot from here on: they see this, and so does the next process. */
static void on_gone(struct part_observer *observer, const struct store_part *part)
{
	const struct keep *keep = container_of(observer, struct keep, observer);
	uint64_t place;

	__atomic_store_n(&record_of(keep, &part->slot, &place)->sum, 0, __ATOMIC_SEQ_CST);
}

static int record_place(const struct keep *keep, const struct keep_record *record,
			struct store_class *class, uint32_t slab, uint32_t index)
{
	struct store_space *space = class->space;
	struct store_part *part = NULL;
	struct store_chunk *chunk;
	int r;

	if (record->tokens == 0 || record->tokens > space->tokens ||
	    record->first > UINT32_MAX ||
	    arena_slot_size(keep->store->arena, class->canon->slot_bytes) !=
		    keep->head->slabs[slab].slot_bytes)
		return err_raise(ERR_PROTO, "size differs from its class");
	r = store_chunk_get(space, record->id, record->first, record->tokens, &chunk);
	if (r < 0)
		return err_pass(r);
	if (store_part_find(chunk, class))
		r = err_raise(ERR_EXIST, "duplicate part");
	if (r >= 0)
		r = store_part_outside(chunk, class, &part);
	if (r >= 0)
		r = arena_place(space->tenant->owner, class->canon->slot_bytes, slab,
				index, &chunk->item, &part->slot);
	if (r >= 0)
		store_part_ready(part);
	else if (part)
		store_part_free(part);
	store_chunk_unpin(chunk);
	return err_pass(r);
}

static int record_restore(struct keep *keep, struct keep_record *record, uint32_t slab,
			  uint32_t index)
{
	struct store_class *class;
	int r = class_restored(keep, record->class, &class);

	if (r >= 0)
		r = record_place(keep, record, class, slab, index);
	if (r < 0)
		record->sum = 0;
	return err_pass(r);
}

static uint64_t slab_restore(struct keep *keep, uint32_t slab, uint64_t *refused_p)
{
	struct keep_slab *kept = &keep->head->slabs[slab];
	uint64_t found = 0;

	if (kept->used > keep->slab_records)
		*kept = (struct keep_slab){0};
	for (uint32_t i = 0; i < kept->used; i++) {
		uint64_t place = slab * keep->slab_records + i;
		struct keep_record *record = &keep->records[place];

		if (!record->sum)
			continue;
		if (record->sum != record_sum(record, kept->slot_bytes, place)) {
			record->sum = 0;
		} else if (record_restore(keep, record, slab, i) < 0) {
			err_clear();
			++*refused_p;
		} else {
			found++;
		}
	}
	return found;
}

void keep_restore(struct keep *keep)
{
	uint64_t found = 0, refused = 0;

	if (!keep)
		return;
	for (uint32_t i = 0; i < ARENA_SLABS; i++)
		found += slab_restore(keep, i, &refused);
	idmap_fini(&keep->restored);
	idmap_init(&keep->restored);
	if (found || refused)
		log_info("store", NULL, "restored chunks of the previous process",
			 "parts=%llu refused=%llu", (unsigned long long)found,
			 (unsigned long long)refused);
}
