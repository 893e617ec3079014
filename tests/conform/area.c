/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Areas: engine memory of every kind, and the driver's view of it.
 *
 * The driver makes the memory (or the owner process that has it) and keeps a
 * way to read it without asking the end: a memfd or shm object by pread(), a
 * process's private memory by process_vm_readv(). So it can look while a
 * transfer runs, after an end was killed, and at memory that was cut.
 */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/uio.h>
#include <sys/wait.h>
#include <unistd.h>
#include <xxhash.h>

#include "daemon/base/mem.h"
#include "tests/conform/conform.h"

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

bool area_read(const struct area *area, uint64_t offset, void *buf, size_t len)
{
	uint8_t *at = buf;

	if (area->kind == MEMORY_VM) {
		struct iovec local = {buf, len};
		struct iovec remote = {(void *)(uintptr_t)(area->address + offset), len};

		return process_vm_readv(area->owner, &local, 1, &remote, 1, 0) ==
		       (ssize_t)len;
	}
	while (len) {
		ssize_t n = pread(area->fd, at, len, (off_t)offset);

		if (n <= 0)
			return false;
		at += n;
		offset += (uint64_t)n;
		len -= (size_t)n;
	}
	return true;
}

void area_write(struct area *area, uint64_t offset, const void *buf, size_t len)
{
	const uint8_t *at = buf;

	memcpy(area->image + offset, buf, len);
	if (area->kind == MEMORY_VM) {
		struct iovec local = {(void *)(uintptr_t)buf, len};
		struct iovec remote = {(void *)(uintptr_t)(area->address + offset), len};

		CHECK(process_vm_writev(area->owner, &local, 1, &remote, 1, 0) ==
			      (ssize_t)len,
		      "writing the owner's memory: %s", strerror(errno));
		return;
	}
	while (len) {
		ssize_t n = pwrite(area->fd, at, len, (off_t)offset);

		CHECK(n > 0, "writing an area: %s", strerror(errno));
		at += n;
		offset += (uint64_t)n;
		len -= (size_t)n;
	}
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

static void make_memfd(struct area *area)
{
	area->fd = memfd_create("conform", MFD_CLOEXEC | MFD_ALLOW_SEALING);
	CHECK(area->fd >= 0 && ftruncate(area->fd, (off_t)area->length) == 0, "memfd: %s",
	      strerror(errno));
	CHECK(fcntl(area->fd, F_ADD_SEALS, F_SEAL_SHRINK) == 0, "seal: %s",
	      strerror(errno));
}

static void make_shm(struct area *area)
{
	char name[64];

	snprintf(name, sizeof(name), "/conform-%d-%llu", (int)getpid(),
		 (unsigned long long)world_random(area->world, UINT64_MAX));
	area->fd = shm_open(name, O_RDWR | O_CREAT | O_EXCL, 0600);
	CHECK(area->fd >= 0, "shm_open: %s", strerror(errno));
	shm_unlink(name);
	CHECK(ftruncate(area->fd, (off_t)area->length) == 0, "shm: %s", strerror(errno));
}

int owner_main(int sock, uint64_t length)
{
	uint64_t address;
	char byte;
	void *base = mmap(NULL, length, PROT_READ | PROT_WRITE,
			  MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

	if (base == MAP_FAILED)
		return 1;
	prctl(PR_SET_PTRACER, PR_SET_PTRACER_ANY);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	address = (uint64_t)(uintptr_t)base;
	if (write(sock, &address, sizeof(address)) != sizeof(address))
		return 1;
	while (read(sock, &byte, 1) > 0)
		continue; /* until the driver lets go */
	return 0;
}

static void make_owner(struct area *area)
{
	int pair[2];
	char fd_word[16], length_word[32];

	CHECK(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) == 0,
	      "socketpair: %s", strerror(errno));
	snprintf(fd_word, sizeof(fd_word), "%d", pair[1]);
	snprintf(length_word, sizeof(length_word), "%llu",
		 (unsigned long long)area->length);
	area->owner = fork();
	CHECK(area->owner >= 0, "fork: %s", strerror(errno));
	if (area->owner == 0) {
		fcntl(pair[1], F_SETFD, 0);
		execl("/proc/self/exe", "conform", "--owner", fd_word, length_word, NULL);
		_exit(127);
	}
	close(pair[1]);
	area->owner_sock = pair[0];
	CHECK(read(pair[0], &area->address, sizeof(area->address)) ==
		      sizeof(area->address),
	      "the owner process did not start");
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
	area->fd = area->gpu.file;
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
				   .a = {area->slot, (uint64_t)area->owner, area->address,
					 area->length}};
		return end_call_full(area->at, &cmd, NULL, -1, &blob, &fd);
	}
	if (area->kind == MEMORY_LINEAR) {
		cmd = (struct cmd){.type = CMD_MEM_LINEAR,
				   .a = {area->slot, area->length}};
		reply = end_call_full(area->at, &cmd, NULL, -1, &blob, &fd);
		if (reply.result == 0) {
			area->fd = area->at->puppet ? fcntl(fd, F_DUPFD_CLOEXEC, 0) : fd;
			CHECK(area->fd >= 0, "linear memory without an fd");
		}
		return reply;
	}
	return end_call_full(area->at, &cmd, NULL, area->fd, &blob, &fd);
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
	area->fd = area->owner_sock = -1;
	area->gpu.pid = area->gpu.sock = area->gpu.file = area->gpu.handle.fd = -1;
	area->slot = slot_take(&at->mems, PUPPET_MEMS);
	area->unreffed = area->deregged = true;
	for (uint32_t i = 0; i < ENDS_MAX; i++)
		area->keys[i] = PUPPET_NONE;
	area->image = mem_zalloc(length + 8);
	CHECK(area->image, "no memory");
	pattern_fill(area->image, length, world_random(world, UINT64_MAX));
	list_push_back(&world->areas, &area->link);
	if (kind == MEMORY_SEALED)
		make_memfd(area);
	else if (kind == MEMORY_GUARDED)
		make_shm(area);
	else if (kind == MEMORY_VM)
		make_owner(area);
	else if (kind == MEMORY_DEVICE)
		make_device(area);
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

	if (slot == PUPPET_NONE)
		return;
	if (other->alive)
		end_call(other, CMD_KEY_DROP, slot, 0, 0, 0);
	other->keys.used[slot] = false;
	area->keys[other->index] = PUPPET_NONE;
}

/* ---- ending ---- */

void area_unref(struct area *area)
{
	if (!area->unreffed && area->at->alive)
		end_call(area->at, CMD_MEM_UNREF, area->slot, 0, 0, 0);
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
	area->unchecked = true;
	CHECK(ftruncate(area->fd, (off_t)length) == 0, "ftruncate: %s", strerror(errno));
}

static void owner_end(struct area *area)
{
	close(area->owner_sock);
	area->owner_sock = -1;
	waitpid(area->owner, NULL, 0);
}

void area_owner_kill(struct area *area)
{
	area->unchecked = true;
	kill(area->owner, SIGKILL);
	owner_end(area);
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
	if (area->owner_sock >= 0)
		owner_end(area);
	if (area->kind == MEMORY_DEVICE)
		gpu_owner_end(&area->gpu);
	else if (area->fd >= 0)
		close(area->fd);
	list_remove(&area->link);
	mem_free(area->image);
	mem_free(area);
}

void area_still(struct area *area, uint64_t hash)
{
	struct still *still = mem_zalloc(sizeof(*still));

	CHECK(still, "no memory");
	still->area = area;
	still->hash = hash;
	still->due_ns = world_now_ns(area->world) + STILL_NS;
	/* out of the case's hands, until it is due */
	list_remove(&area->link);
	list_push_back(&area->world->stills, &still->link);
}

unsigned int stills_check(struct world *world, bool wait)
{
	unsigned int moved = 0;
	struct still *still;

	list_foreach_safe (still, &world->stills, link) {
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
