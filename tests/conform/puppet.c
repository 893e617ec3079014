/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The puppet's objects and its ear for callbacks: here the promises of
 * transport.h are checked that only the callee of a callback can see.
 *
 * - never from inside post(), land(), cancel(): `inside` names the call that is
 *   running; a done callback that finds it set is a broken promise;
 * - exactly once: a done for something that has had one, or was never accepted;
 * - on_peer_lost() after all dones, once, and nothing after it;
 * - still: the memory that a transfer wrote is hashed inside the done callback.
 *   The driver compares the hash with the memory a second later, so a single
 *   late byte shows, also one that comes a microsecond after the callback.
 * - what a source did after its done must not count: its memory is overwritten
 *   inside the callback, and the destination may still only have old bytes.
 */
#include "tests/conform/puppet_impl.h"
#include "tests/gpu/fake_cuda.h"
#include "tests/lib/gpu_owner.h"

#include <assert.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>
#include <xxhash.h>

#include "daemon/base/cursor.h"
#include "daemon/base/mem.h"

#define HEADER_MAGIC UINT32_C(0x7075707e)

void puppet_broken(struct puppet *puppet, const char *fmt, ...)
{
	va_list ap;

	if (puppet->broken++)
		return;
	va_start(ap, fmt);
	vsnprintf(puppet->words, sizeof(puppet->words), fmt, ap);
	va_end(ap);
}

void puppet_header(uint8_t *header, size_t len, uint32_t sides, uint32_t sequence)
{
	struct cursor out;

	for (size_t i = 0; i < len; i++)
		header[i] = (uint8_t)(i * 7 + i / 251 + sequence);
	if (len < PUPPET_HEADER_MIN)
		return;
	cursor_write(&out, header, PUPPET_HEADER_MIN);
	cursor_put_u32(&out, HEADER_MAGIC);
	cursor_put_u32(&out, sides);
	cursor_put_u32(&out, sequence);
}

/* ---- memory, as it is now ---- */

static uint64_t hash_fd(const struct memory *memory)
{
	uint8_t *bytes = calloc(1, memory->length);
	uint64_t hash;

	assert(bytes);
	for (uint64_t at = 0; at < memory->length;) {
		ssize_t n = pread(memory->fd, bytes + at, memory->length - at,
				  (off_t)(memory->fd_offset + at));
		if (n <= 0)
			break; /* cut by its owner: the rest counts as zeros */
		at += (uint64_t)n;
	}
	hash = XXH3_64bits(bytes, memory->length);
	free(bytes);
	return hash;
}

static uint64_t hash_vm(const struct memory *memory)
{
	uint8_t *bytes = calloc(1, memory->length);
	uint64_t hash;

	assert(bytes);
	if (pread(memory->mem_fd, bytes, memory->length, (off_t)memory->address) < 0)
		memset(bytes, 0, memory->length);
	hash = XXH3_64bits(bytes, memory->length);
	free(bytes);
	return hash;
}

/* By the file behind the fake's memory. */
static uint64_t hash_device(const struct memory *memory)
{
	__typeof__(fake_cuda_file) *file = gpu_fake_symbol("fake_cuda_file");
	uint8_t *bytes = malloc(memory->length);
	uint64_t offset = 0, hash;
	int fd = -1;

	assert(bytes);
	memset(bytes, 0, memory->length);
	if (file(memory->address, &fd, &offset) == 0)
		(void)!pread(fd, bytes, memory->length, (off_t)offset);
	hash = XXH3_64bits(bytes, memory->length);
	free(bytes);
	return hash;
}

static void poison_device(const struct memory *memory)
{
	__typeof__(fake_cuda_file) *file = gpu_fake_symbol("fake_cuda_file");
	uint8_t *bytes = malloc(memory->length);
	uint64_t offset = 0;
	int fd = -1;

	assert(bytes);
	memset(bytes, PUPPET_POISON, memory->length);
	if (file(memory->address, &fd, &offset) == 0)
		(void)!pwrite(fd, bytes, memory->length, (off_t)offset);
	free(bytes);
}

static uint64_t memory_hash(const struct memory *memory)
{
	if (memory->kind == MEMORY_VM)
		return hash_vm(memory);
	if (memory->kind == MEMORY_GUARDED)
		return hash_fd(memory);
	if (memory->kind == MEMORY_DEVICE)
		return hash_device(memory);
	return XXH3_64bits(memory->base, memory->length);
}

/* Through the file, not the mapping: in a world of one process the other side's
 * copy threads may still read a source that is done (it will not count), which
 * the thread sanitizer takes for a race. */
static void poison(const struct memory *memory)
{
	uint8_t page[4096];
	uint64_t done = 0;

	memset(page, PUPPET_POISON, sizeof(page));
	while (memory->fd >= 0 && done < memory->length) {
		uint64_t left = memory->length - done;
		ssize_t n = pwrite(memory->fd, page,
				   left < sizeof(page) ? left : sizeof(page),
				   (off_t)(memory->fd_offset + done));

		if (n <= 0)
			break;
		done += (uint64_t)n;
	}
	if (done < memory->length)
		memset(memory->base + done, PUPPET_POISON, memory->length - done);
}

/* What a done callback does for the driver. */
static uint64_t sides_done(struct puppet *puppet, const struct puppet_sides *sides)
{
	struct memory *memory;
	uint64_t hash = 0;

	if (!sides)
		return 0;
	if (sides->hash_mem != PUPPET_NONE) {
		memory = puppet->mems[sides->hash_mem].memory;
		hash = memory ? memory_hash(memory) : 0;
	}
	if (sides->poison_mem != PUPPET_NONE) {
		memory = puppet->mems[sides->poison_mem].memory;
		if (memory && memory->kind == MEMORY_DEVICE)
			poison_device(memory);
		else if (memory && memory->base && memory->kind != MEMORY_GUARDED)
			poison(memory);
	}
	return hash;
}

/* ---- callbacks ---- */

static void check_not_inside(struct puppet *puppet, const char *what)
{
	if (puppet->inside)
		puppet_broken(puppet, "%s was called from inside %s()", what,
			      puppet->inside);
}

static void check_first(struct puppet *puppet, unsigned int *firsts, unsigned int dones,
			uint64_t at_ns)
{
	if ((*firsts)++)
		puppet_broken(puppet, "on_first called again");
	if (dones)
		puppet_broken(puppet, "on_first after done");
	if (!at_ns || at_ns > loop_clock_ns(puppet->env.loop))
		puppet_broken(puppet, "on_first of a moment to come");
}

void puppet_on_op_first(struct xp_op *op, uint64_t at_ns)
{
	struct puppet_op *entry = op->owner;

	check_first(entry->puppet, &entry->firsts, entry->dones, at_ns);
}

void puppet_on_op_done(struct xp_op *op)
{
	struct puppet_op *entry = op->owner;
	struct puppet *puppet = entry->puppet;

	check_not_inside(puppet, "on_done");
	if (!entry->posted)
		puppet_broken(puppet, "on_done of an op whose post was refused");
	if (entry->dones++)
		puppet_broken(puppet, "on_done called again");
	if (op->impl)
		puppet_broken(puppet, "op->impl is set in on_done");
	if (puppet->peers[entry->peer].lost)
		puppet_broken(puppet, "on_done after on_peer_lost");
	if (op->result < 0 && op->err.code == ERR_OK)
		puppet_broken(puppet, "a failed op without an error");
	if (!entry->firsts != !op->moved)
		puppet_broken(puppet, "an op of %llu bytes, and on_first came %u times",
			      (unsigned long long)op->moved, entry->firsts);
	entry->hash = sides_done(puppet, entry->sides);
}

struct puppet_in *puppet_in_of(struct puppet *puppet, const struct xp_inbound *in)
{
	return in->owner ? &puppet->ins[(uintptr_t)in->owner - 1] : NULL;
}

static uint32_t peer_slot(struct puppet *puppet, const struct xp_peer *peer)
{
	for (uint32_t i = 0; i < PUPPET_PEERS; i++) {
		if (puppet->peers[i].peer == peer)
			return i;
	}
	return PUPPET_NONE;
}

static void header_read(struct puppet_in *entry, const struct xp_inbound *in)
{
	uint8_t *expected;
	struct cursor c;

	entry->header_len = in->header_len;
	entry->sequence = PUPPET_NONE;
	entry->sides_there = PUPPET_NONE;
	entry->header_ok = true;
	if (in->header_len < PUPPET_HEADER_MIN)
		return;
	cursor_read(&c, in->header, in->header_len);
	entry->header_ok = cursor_get_u32(&c) == HEADER_MAGIC;
	if (!entry->header_ok)
		return;
	entry->sides_there = cursor_get_u32(&c);
	entry->sequence = cursor_get_u32(&c);
	expected = malloc(in->header_len);
	assert(expected);
	puppet_header(expected, in->header_len, entry->sides_there, entry->sequence);
	entry->header_ok = memcmp(expected, in->header, in->header_len) == 0;
	free(expected);
}

static void on_in_first(struct xp_inbound *in, uint64_t at_ns)
{
	const struct xp_peer_base *peer = (const void *)in->peer;
	struct puppet *puppet = peer->transport->callbacks.owner;
	struct puppet_in *entry = puppet_in_of(puppet, in);

	check_first(puppet, &entry->firsts, entry->dones, at_ns);
}

static void on_request(void *owner, struct xp_inbound *in)
{
	struct puppet *puppet = owner;
	struct puppet_in *entry = &puppet->ins[puppet->in_count];
	uint32_t slot = peer_slot(puppet, in->peer);

	if (puppet->in_count >= PUPPET_INS) {
		struct err err;

		err_set(&err, ERR_LIMIT, "the puppet takes no more requests");
		puppet->transport->ops->land(in, NULL, &err);
		return;
	}
	puppet->in_count++;
	*entry = (struct puppet_in){
		.in = in, .peer = slot, .kind = in->kind, .bytes = in->bytes};
	in->owner = (void *)(uintptr_t)puppet->in_count;
	in->on_first = on_in_first;
	if (slot == PUPPET_NONE || !puppet->peers[slot].ready)
		puppet_broken(puppet, "a request of a peer that is not ready");
	else if (puppet->peers[slot].lost)
		puppet_broken(puppet, "a request of a lost peer");
	header_read(entry, in);
	if (puppet->policy == POLICY_LAND)
		puppet_land(puppet, entry, entry->sides_there);
}

static void on_inbound_done(void *owner, struct xp_inbound *in, const struct err *err)
{
	struct puppet *puppet = owner;
	struct puppet_in *entry = puppet_in_of(puppet, in);

	if (!entry)
		return; /* refused for want of a record */
	check_not_inside(puppet, "on_inbound_done");
	if (entry->dones++)
		puppet_broken(puppet, "on_inbound_done called again");
	if (entry->peer != PUPPET_NONE && puppet->peers[entry->peer].lost)
		puppet_broken(puppet, "on_inbound_done after on_peer_lost");
	if (!err && !entry->answered)
		puppet_broken(puppet, "an inbound succeeded without an answer");
	if (err && err->code == ERR_OK)
		puppet_broken(puppet, "an inbound failed without an error");
	if (!entry->firsts != !in->moved)
		puppet_broken(puppet, "%llu bytes came in, and on_first %u times",
			      (unsigned long long)in->moved, entry->firsts);
	entry->moved = in->moved;
	entry->failed = err != NULL;
	if (err)
		entry->err = *err;
	entry->in = NULL;
	entry->hash = sides_done(puppet, entry->sides);
}

static void on_peer_ready(void *owner, struct xp_peer *peer)
{
	struct puppet *puppet = owner;
	uint32_t slot = peer_slot(puppet, peer);
	const struct xp_peer_base *base = (const void *)peer;

	if (slot == PUPPET_NONE) {
		puppet_broken(puppet, "on_peer_ready of an unknown peer");
		return;
	}
	if (puppet->peers[slot].ready)
		puppet_broken(puppet, "on_peer_ready called again");
	if (puppet->peers[slot].lost)
		puppet_broken(puppet, "on_peer_ready after on_peer_lost");
	if (!base->ready || !base->path[0])
		puppet_broken(puppet, "a ready peer without `ready` or `path`");
	puppet->peers[slot].ready = true;
}

/* Ops and inbounds of a peer that have had no done yet. */
static unsigned int live_at(const struct puppet *puppet, uint32_t peer)
{
	unsigned int live = 0;

	for (uint32_t i = 0; i < PUPPET_OPS; i++) {
		const struct puppet_op *op = puppet->ops[i];

		live += op && op->posted && !op->dones && op->peer == peer;
	}
	for (uint32_t i = 0; i < puppet->in_count; i++)
		live += puppet->ins[i].in && puppet->ins[i].peer == peer;
	return live;
}

static void on_peer_lost(void *owner, struct xp_peer *peer, const struct err *why)
{
	struct puppet *puppet = owner;
	uint32_t slot = peer_slot(puppet, peer);
	unsigned int live;

	if (slot == PUPPET_NONE) {
		puppet_broken(puppet, "on_peer_lost of an unknown peer");
		return;
	}
	if (puppet->peers[slot].lost++)
		puppet_broken(puppet, "on_peer_lost called again");
	live = live_at(puppet, slot);
	if (live)
		puppet_broken(puppet, "%u transfers without a done at on_peer_lost",
			      live);
	if (!why || why->code == ERR_OK)
		puppet_broken(puppet, "on_peer_lost without a reason");
	else
		puppet->peers[slot].why = *why;
	puppet->peers[slot].ready = false;
}

static void on_key(void *owner, struct xp_key *key, const struct err *err)
{
	struct puppet *puppet = owner;
	struct puppet_key *entry = ((const struct xp_key_base *)(const void *)key)->owner;

	if (entry->state)
		puppet_broken(puppet, "on_key called again");
	entry->state = err ? 2 : 1;
	if (err)
		entry->why = *err;
}

const struct xp_callbacks puppet_callbacks = {
	.on_request = on_request,
	.on_inbound_done = on_inbound_done,
	.on_peer_ready = on_peer_ready,
	.on_peer_lost = on_peer_lost,
	.on_key = on_key,
};

void puppet_peer_closed(void *arg)
{
	struct puppet_peer *entry = arg;
	struct puppet *puppet = entry->puppet;
	unsigned int live;

	if (entry->closed)
		puppet_broken(puppet, "on_closed called again");
	live = live_at(puppet, (uint32_t)(entry - puppet->peers));
	if (live)
		puppet_broken(puppet, "%u transfers without a done at on_closed", live);
	entry->closed = true;
	entry->ready = false;
}

void puppet_land(struct puppet *puppet, struct puppet_in *entry, uint32_t sides)
{
	const char *outer = puppet->inside;
	struct err err;

	entry->answered = true;
	puppet->inside = "land";
	if (entry->kind == XP_CHECK) {
		puppet->transport->ops->land(entry->in, NULL, NULL);
	} else if (sides == PUPPET_NONE && entry->bytes == 0) {
		puppet->transport->ops->land(entry->in, &(struct xp_sides){0}, NULL);
	} else if (sides >= PUPPET_SIDES || !puppet->sides[sides].sides.plan) {
		err_set(&err, ERR_NOTFOUND, "the puppet has no sides %u", sides);
		puppet->transport->ops->land(entry->in, NULL, &err);
	} else {
		entry->sides = &puppet->sides[sides];
		puppet->transport->ops->land(entry->in, &entry->sides->sides, NULL);
	}
	puppet->inside = outer;
}

/* ---- life ---- */

static bool on_prepare(struct loop_prepare *prepare)
{
	struct puppet *puppet = container_of(prepare, struct puppet, prepare);
	struct transport *transport = puppet->transport;

	if (transport->ops->progress && transport->ops->progress(transport, 64))
		return true;
	return transport->ops->arm && transport->ops->arm(transport);
}

int puppet_new(const struct transport_ops *ops, const struct xp_env *env,
	       struct puppet **puppet_p)
{
	struct puppet *puppet = mem_zalloc(sizeof(*puppet));
	struct xp_callbacks callbacks = puppet_callbacks;
	int r;

	if (!puppet)
		return -1;
	puppet->env = *env;
	callbacks.owner = puppet;
	for (uint32_t i = 0; i < PUPPET_PEERS; i++)
		puppet->peers[i].puppet = puppet;
	for (uint32_t i = 0; i < PUPPET_MEMS; i++)
		puppet->mems[i].puppet = puppet;
	r = ops->open(env, &callbacks, &puppet->transport);
	if (r < 0) {
		mem_free(puppet);
		return err_pass(r);
	}
	puppet->prepare.on_prepare = on_prepare;
	if (ops->progress || ops->arm)
		loop_prepare_add(env->loop, &puppet->prepare);
	*puppet_p = puppet;
	return 0;
}

struct transport *puppet_transport(struct puppet *puppet)
{
	return puppet->transport;
}

void puppet_sides_clear(struct puppet_sides *sides)
{
	mem_free(sides->buffers);
	*sides = (struct puppet_sides){0};
}

static void mem_job_work(struct offload_job *job)
{
	struct puppet_mem *entry = container_of(job, struct puppet_mem, job);
	struct transport *transport = entry->puppet->transport;

	job->result = 0;
	if (entry->dereg) {
		transport->ops->mem_dereg(entry->reg);
		entry->reg = NULL;
		return;
	}
	if (entry->puppet->fail_reg)
		mem_fail_at(entry->puppet->fail_reg);
	job->result = transport->ops->mem_reg(transport, entry->memory, &entry->reg);
	if (entry->puppet->fail_reg) {
		entry->puppet->reg_count = mem_count();
		mem_fail_at(0);
	}
	if (job->result < 0) {
		entry->reg = NULL;
		err_take(&job->err);
	}
}

static void mem_job_done(struct offload_job *job)
{
	struct puppet_mem *entry = container_of(job, struct puppet_mem, job);

	if (!entry->reg && !entry->reffed)
		entry->memory = NULL;
}

void puppet_mem_job(struct puppet_mem *entry, bool dereg)
{
	assert(!entry->job.submitted);
	entry->dereg = dereg;
	entry->job.work = mem_job_work;
	entry->job.done = mem_job_done;
	offload_submit(entry->puppet->env.offload, &entry->job);
}

static bool mems_ended(struct puppet *puppet)
{
	bool ended = true;

	for (uint32_t i = 0; i < PUPPET_MEMS; i++) {
		struct puppet_mem *entry = &puppet->mems[i];

		if (!entry->job.submitted && entry->reg)
			puppet_mem_job(entry, true);
		ended = ended && !entry->job.submitted && !entry->reg;
	}
	return ended;
}

bool puppet_ended(struct puppet *puppet)
{
	if (!puppet->ending)
		return false;
	for (uint32_t i = 0; i < PUPPET_PEERS; i++) {
		if (puppet->peers[i].peer && !puppet->peers[i].closed)
			return false;
	}
	return mems_ended(puppet);
}

void puppet_end_step(struct puppet *puppet)
{
	const struct transport_ops *ops = puppet->transport->ops;

	puppet->ending = true;
	for (uint32_t i = 0; i < PUPPET_KEYS; i++) {
		if (puppet->keys[i].key)
			ops->key_drop(puppet->keys[i].key);
		puppet->keys[i].key = NULL;
	}
	for (uint32_t i = 0; i < PUPPET_PEERS; i++) {
		struct puppet_peer *entry = &puppet->peers[i];

		if (entry->peer && !entry->closing) {
			entry->closing = true;
			ops->peer_close(entry->peer, puppet_peer_closed, entry);
		}
	}
}

void puppet_free(struct puppet *puppet)
{
	const struct transport_ops *ops = puppet->transport->ops;
	bool ended = puppet_ended(puppet);

	assert(ended);
	for (uint32_t i = 0; i < PUPPET_OPS; i++) {
		if (puppet->ops[i]) {
			free(puppet->ops[i]->header);
			mem_free(puppet->ops[i]->op.owned);
		}
		free(puppet->ops[i]);
	}
	for (uint32_t i = 0; i < PUPPET_SIDES; i++)
		puppet_sides_clear(&puppet->sides[i]);
	for (uint32_t i = 0; i < PUPPET_PLANS; i++)
		plan_free(puppet->plans[i]);
	for (uint32_t i = 0; i < PUPPET_MEMS; i++) {
		if (puppet->mems[i].reffed)
			memory_unref(puppet->mems[i].memory);
	}
	if (ops->progress || ops->arm)
		loop_prepare_remove(&puppet->prepare);
	ops->close(puppet->transport);
	mem_free(puppet);
}
