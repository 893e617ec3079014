/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Areas: engine memory of every kind, and the driver's view of it, which asks no end
 * (store.h): the memory is the driver's, or its keeper's where the end is on another
 * machine.
 */
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"
#include "tests/conform/keeper.h"

#define PIECE_BYTES ((size_t)1 << 20)

struct still {
	struct list link;
	struct area *area;
	uint64_t hash, due_ns;
};

static void pattern_fill(uint8_t *image, uint64_t length, uint64_t seed)
{
	for (uint64_t i = 0; i < length; i += 8) {
		uint64_t z = seed + i * UINT64_C(0x9e3779b97f4a7c15);

		z = (z ^ (z >> 30)) * UINT64_C(0xbf58476d1ce4e5b9);
		z ^= z >> 31;
		memcpy(image + i, &z, length - i < 8 ? length - i : 8);
	}
}

/* ---- the view ---- */

static struct reply keep(const struct area *area, uint32_t type, uint64_t a1, uint64_t a2,
			 const void *blob, uint32_t blob_len, const void **out_p)
{
	const struct cmd cmd = {
		.type = type, .blob_len = blob_len, .a = {area->slot, a1, a2}};

	return end_keep(area->at, &cmd, blob, out_p);
}

/* In pieces that a message can be. */
static bool far_read(const struct area *area, uint64_t offset, uint8_t *at, size_t len)
{
	while (len) {
		size_t n = len < PIECE_BYTES ? len : PIECE_BYTES;
		const void *out;

		if (keep(area, KEEP_READ, offset, n, NULL, 0, &out).result < 0)
			return false;
		memcpy(at, out, n);
		at += n;
		offset += n;
		len -= n;
	}
	return true;
}

static bool far_write(const struct area *area, uint64_t offset, const uint8_t *at,
		      size_t len)
{
	while (len) {
		size_t n = len < PIECE_BYTES ? len : PIECE_BYTES;
		const void *out;

		if (keep(area, KEEP_WRITE, offset, 0, at, (uint32_t)n, &out).result < 0)
			return false;
		at += n;
		offset += n;
		len -= n;
	}
	return true;
}

bool area_read(const struct area *area, uint64_t offset, void *buf, size_t len)
{
	return area->at->far ? far_read(area, offset, buf, len)
			     : store_read(&area->store, offset, buf, len);
}

bool area_samples(const struct area *area, const uint64_t *offsets, unsigned int count,
		  uint8_t (*out)[AREA_SAMPLE])
{
	const void *found;

	if (area->at->far) {
		if (keep(area, KEEP_SAMPLES, AREA_SAMPLE, 0, offsets,
			 (uint32_t)(count * sizeof(*offsets)), &found)
			    .result < 0)
			return false;
		memcpy(out, found, (size_t)count * AREA_SAMPLE);
		return true;
	}
	for (unsigned int i = 0; i < count; i++)
		if (!store_read(&area->store, offsets[i], out[i], AREA_SAMPLE))
			return false;
	return true;
}

void area_write(struct area *area, uint64_t offset, const void *buf, size_t len)
{
	memcpy(area->image + offset, buf, len);
	CHECK(area->at->far ? far_write(area, offset, buf, len)
			    : store_write(&area->store, offset, buf, len),
	      "writing an area: %s", strerror(errno));
}

static uint8_t *area_copy(const struct area *area)
{
	uint8_t *copy = mem_zalloc(area->length);

	CHECK(copy, "no memory for a copy");
	CHECK(area_read(area, 0, copy, area->length), "an area's memory is gone");
	return copy;
}

void area_verify(struct area *area)
{
	cleanup_free uint8_t *now = NULL;

	if (area->unchecked)
		return;
	now = area_copy(area);
	if (memcmp(now, area->image, area->length) == 0)
		return;
	for (uint64_t i = 0; i < area->length; i++) {
		if (now[i] != area->image[i]) {
			mem_free(mem_steal(now));
			FAIL("%c's memory %u is wrong at byte %llu of %llu",
			     'A' + (char)area->at->index, area->slot,
			     (unsigned long long)i, (unsigned long long)area->length);
		}
	}
}

void area_resync(struct area *area)
{
	CHECK(area_read(area, 0, area->image, area->length), "an area's memory is gone");
}

uint64_t area_hash(const struct area *area)
{
	uint8_t *now = area_copy(area);
	uint64_t hash = XXH3_64bits(now, area->length);

	mem_free(now);
	return hash;
}

/* ---- making ---- */

static void make_store(struct area *area)
{
	const void *out;
	int r;

	if (area->at->far)
		r = keep(area, KEEP_MAKE, area->kind, area->length, NULL, 0, &out).result;
	else
		r = store_init(&area->store, area->kind, area->length);
	CHECK(r == 0, "an engine's memory: %s", strerror(-r));
}

/* Of both kinds, and now and then on another device. */
static void make_device(struct area *area)
{
	bool vmm = area->slot % 3 == 1;
	uint64_t unit = UINT64_C(2) << 20;
	uint64_t bytes = vmm ? (area->length + unit - 1) / unit * unit : area->length;

	CHECK(gpu_owner_start(&area->gpu, vmm ? GPU_HANDLE_VMM : GPU_HANDLE_IPC,
			      area->slot % 5 == 4, bytes),
	      "the engine's process did not start");
	area->store.fd = area->gpu.file;
}

static struct reply import_device(struct area *area)
{
	struct cmd cmd = {.type = CMD_MEM_DEVICE,
			  .blob_len = sizeof(area->gpu.handle),
			  .a = {area->slot, area->length}};
	const void *blob;
	int fd = -1;

	return end_call_full(area->at, &cmd, &area->gpu.handle, area->gpu.handle.fd,
			     &blob, &fd);
}

static struct reply import(struct area *area)
{
	struct cmd cmd = {.type = CMD_MEM_FD,
			  .a = {area->slot, area->kind, area->length, 0}};
	const void *blob;
	int fd = -1;
	struct reply reply;

	if (area->kind == MEMORY_DEVICE)
		return import_device(area);
	if (area->kind == MEMORY_VM) {
		cmd = (struct cmd){.type = CMD_MEM_VM,
				   .a = {area->slot, (uint64_t)area->store.owner,
					 area->store.address, area->length}};
		return end_call_full(area->at, &cmd, NULL, -1, &blob, &fd);
	}
	if (area->kind == MEMORY_LINEAR) {
		cmd = (struct cmd){.type = CMD_MEM_LINEAR,
				   .a = {area->slot, area->length}};
		reply = end_call_full(area->at, &cmd, NULL, -1, &blob, &fd);
		if (reply.result == 0 && !area->at->far) {
			area->store.fd =
				area->at->puppet ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : fd;
			CHECK(area->store.fd >= 0, "linear memory without an fd");
		}
		return reply;
	}
	return end_call_full(area->at, &cmd, NULL, area->store.fd, &blob, &fd);
}

static bool mem_idle(struct area *area)
{
	return end_call(area->at, CMD_MEM_STATE, area->slot, 0, 0, 0).v[2] == 0;
}

static void register_it(struct area *area)
{
	struct cmd cmd = {.type = CMD_MEM_STATE, .a = {area->slot}};
	char words[ERR_TEXT_MAX] = "";
	const void *blob;
	struct reply reply;
	int fd;

	end_call(area->at, CMD_MEM_REG, area->slot, 0, 0, 0);
	CHECK(AWAIT(area->world, mem_idle(area)), "mem_reg does not end");
	reply = end_call_full(area->at, &cmd, NULL, -1, &blob, &fd);
	if (reply.blob_len)
		snprintf(words, sizeof(words), "%s", (const char *)blob);
	if (reply.v[3])
		return;
	area->deregged = true;
	if (area->kind == MEMORY_SEALED || area->kind == MEMORY_DEVICE)
		FAIL("mem_reg: %s", words);
	case_skip("memory of this kind with the backend: %s", words);
}

/* A container may forbid what private memory of other processes is judged by. */
static void skip_without_reach(struct area *area)
{
	if (area->kind != MEMORY_VM || area->at->far ||
	    store_write(&area->store, 0, area->image, 1) ||
	    (errno != EPERM && errno != ENOSYS))
		return;
	area->unchecked = true;
	case_skip("the right to process_vm_writev()");
}

struct area *area_new(struct world *world, struct end *at, enum memory_kind kind,
		      uint64_t length)
{
	struct area *area = mem_zalloc(sizeof(*area));
	struct reply reply;

	CHECK(area, "no memory");
	if (world->backend->gpu && kind == MEMORY_SEALED)
		kind = MEMORY_DEVICE;
	area->world = world;
	area->at = at;
	area->kind = kind;
	area->length = length;
	area->store = (struct store){
		.kind = kind, .length = length, .fd = -1, .owner_sock = -1};
	area->gpu.pid = area->gpu.sock = area->gpu.file = area->gpu.handle.fd = -1;
	area->slot = slot_take(&at->mems, PUPPET_MEMS);
	area->unreffed = area->deregged = true;
	for (uint32_t i = 0; i < ENDS_MAX; i++)
		area->keys[i] = PUPPET_NONE;
	area->image = mem_zalloc(length + 8);
	CHECK(area->image, "no memory");
	pattern_fill(area->image, length, world_random(world, UINT64_MAX));
	list_push_back(&world->areas, &area->link);
	if (kind == MEMORY_DEVICE)
		make_device(area);
	else
		make_store(area);
	skip_without_reach(area);
	if (kind != MEMORY_LINEAR)
		area_write(area, 0, area->image, length);
	reply = import(area);
	CHECK(reply.result == 0, "import: %s", reply.err.text);
	if (kind == MEMORY_LINEAR)
		area_write(area, 0, area->image, length);
	area->unreffed = area->deregged = false;
	register_it(area);
	return area;
}

/* ---- keys ---- */

static uint64_t key_state(struct end *end, uint32_t key)
{
	return end_call(end, CMD_KEY_STATE, key, 0, 0, 0).v[0];
}

static void key_refused(struct area *area, const struct err *err)
{
	if (area->kind == MEMORY_SEALED || area->kind == MEMORY_LINEAR ||
	    area->kind == MEMORY_DEVICE)
		FAIL("key: %s", err->text);
	case_skip("a key of such memory: %s", err->text);
}

uint32_t area_key(struct area *area, struct end *other)
{
	struct cmd pack = {.type = CMD_KEY_PACK, .a = {area->slot, other->index}};
	struct cmd unpack = {.type = CMD_KEY_UNPACK};
	uint8_t key[XP_KEY_MAX];
	uint32_t slot = area->keys[other->index];
	const void *blob;
	struct reply reply;
	int fd;

	if (slot != PUPPET_NONE)
		return slot;
	reply = end_call_full(area->at, &pack, NULL, -1, &blob, &fd);
	if (reply.result < 0)
		key_refused(area, &reply.err);
	unpack.blob_len = reply.blob_len;
	memcpy(key, blob, reply.blob_len);
	slot = slot_take(&other->keys, PUPPET_KEYS);
	area->keys[other->index] = slot;
	unpack.a[0] = slot;
	unpack.a[1] = area->at->index;
	reply = end_call_full(other, &unpack, key, -1, &blob, &fd);
	if (reply.result < 0)
		key_refused(area, &reply.err);
	CHECK(AWAIT(area->world, key_state(other, slot) != 0), "a key never gets usable");
	CHECK(key_state(other, slot) == 1, "a key failed");
	return slot;
}

void area_key_drop(struct area *area, struct end *other)
{
	uint32_t slot = area->keys[other->index];
	const struct cmd cmd = {.type = CMD_KEY_DROP, .a = {slot}};

	if (slot == PUPPET_NONE)
		return;
	if (other->alive)
		end_post(other, &cmd, NULL);
	other->keys.used[slot] = false;
	area->keys[other->index] = PUPPET_NONE;
}

/* ---- ending ---- */

void area_unref(struct area *area)
{
	const struct cmd cmd = {.type = CMD_MEM_UNREF, .a = {area->slot}};

	if (!area->unreffed && area->at->alive)
		end_post(area->at, &cmd, NULL);
	area->unreffed = true;
}

void area_dereg(struct area *area)
{
	if (!area->deregged && area->at->alive) {
		end_call(area->at, CMD_MEM_DEREG, area->slot, 0, 0, 0);
		CHECK(AWAIT(area->world, mem_idle(area)), "mem_dereg does not end");
	}
	area->deregged = true;
}

void area_cut(struct area *area, uint64_t length)
{
	const void *out;

	area->unchecked = true;
	CHECK(area->at->far ? keep(area, KEEP_CUT, length, 0, NULL, 0, &out).result == 0
			    : store_cut(&area->store, length),
	      "ftruncate: %s", strerror(errno));
}

void area_owner_kill(struct area *area)
{
	const void *out;

	area->unchecked = true;
	if (area->at->far)
		keep(area, KEEP_OWNER_KILL, 0, 0, NULL, 0, &out);
	else
		store_owner_kill(&area->store);
}

static void store_end(struct area *area)
{
	const void *out;

	if (area->at->far)
		keep(area, KEEP_END, 0, 0, NULL, 0, &out);
	else
		store_fini(&area->store);
}

void area_free(struct area *area)
{
	struct world *world = area->world;

	for (uint32_t i = 0; i < ENDS_MAX; i++) {
		if (world->end[i])
			area_key_drop(area, world->end[i]);
	}
	area_dereg(area);
	area_unref(area);
	area->at->mems.used[area->slot] = false;
	if (area->kind == MEMORY_DEVICE)
		gpu_owner_end(&area->gpu);
	else
		store_end(area);
	list_remove(&area->link);
	mem_free(area->image);
	mem_free(area);
}

void area_leave(struct area *area)
{
	if (!area->is_still)
		area_free(area);
}

void area_still(struct area *area, uint64_t hash)
{
	struct still *still = mem_zalloc(sizeof(*still));

	CHECK(still, "no memory");
	still->area = area;
	still->hash = hash;
	still->due_ns = world_now_ns(area->world) + STILL_NS;
	area->is_still = true;
	/* out of the case's hands, until it is due */
	list_remove(&area->link);
	list_push_back(&area->world->stills, &still->link);
}

unsigned int stills_check(struct world *world, bool wait)
{
	unsigned int moved = 0;
	struct still *still;

	list_foreach_safe(still, &world->stills, link) {
		uint64_t now_ns = world_now_ns(world);

		if (now_ns < still->due_ns) {
			if (!wait)
				continue;
			world_run_ns(world, still->due_ns - now_ns);
		}
		moved += area_hash(still->area) != still->hash;
		list_remove(&still->link);
		area_free(still->area);
		mem_free(still);
	}
	return moved;
}
