/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory of the verbs backend, and keys.
 *
 * One registration for each region and device, in pieces where a region is larger
 * than one may be. The adapter pins the pages, so only memory that cannot vanish
 * is taken: a POSIX shm object that its owner cuts would leave the adapter writing
 * to pages that nobody has any more, and be called a success; memory of another
 * process cannot be registered here at all. Both are refused by name.
 *
 * A registration lives while its owner or a transfer holds it, also at the side
 * that only answers: so a peer that was told GO never meets a dead key, which
 * would cost the connection and with it every other transfer.
 *
 * Memory of a GPU is registered to be read from: as the source of a push's gathers or
 * a pull's reads. It is not written by an adapter: that its bytes can be seen by the
 * GPU when they have landed is not shown by a completion (there may be several ways
 * to it), so such a transfer is refused by name, before a byte moves.
 *
 * No memory windows: an invalidated key ends a reliable connection just as well as
 * resetting the owner's queue pair does.
 */
#include "daemon/transport/verbs_impl.h"

#include <errno.h>
#include <string.h>
#include <xxhash.h>

#include "daemon/base/mem.h"

#define PIECE_SHIFT 36u /* 64 GiB at most; what the adapter takes, if that is less */

static struct verbs_transport *transport_of(const struct verbs_reg *reg)
{
	return container_of(reg->base.transport, struct verbs_transport, net.base);
}

/* Any thread. */
static void release(struct verbs_reg *reg)
{
	const struct verbs_lib *lib = transport_of(reg)->lib;

	for (uint32_t i = 0; i < VERBS_RAILS_MAX; i++)
		for (uint32_t j = 0; j < VERBS_PIECES_MAX; j++)
			if (reg->mr[i][j])
				lib->dereg_mr(reg->mr[i][j]);
	memory_unref(reg->base.memory);
}

static void release_work(struct offload_job *job)
{
	struct verbs_reg *reg = container_of(job, struct verbs_reg, job);
	struct verbs_transport *transport = transport_of(reg);

	release(reg);
	atomic_fetch_sub(&transport->releasing, 1); /* it may close now */
}

static void release_done(struct offload_job *job)
{
	mem_free(container_of(job, struct verbs_reg, job));
}

static bool is_device(const struct memory *memory)
{
	return memory->kind == MEMORY_DEVICE;
}

/* A GPU's: by its dma-buf, which needs no CUDA here; else by its address in this
 * process, which a peer-memory module of the kernel must know. */
static struct ibv_mr *register_device(struct verbs_reg *reg, struct verbs_device *device,
				      uint64_t begin, uint64_t length, int access)
{
	const struct verbs_lib *lib = transport_of(reg)->lib;
	const struct memory *memory = reg->base.memory;
	struct ibv_mr *mr = NULL;

	errno = EOPNOTSUPP;
	if (memory->dmabuf_fd >= 0 && lib->reg_dmabuf_mr)
		mr = lib->reg_dmabuf_mr(device->pd, memory->dmabuf_offset + begin, length,
					reg->address + begin, memory->dmabuf_fd, access);
	if (!mr && memory->address)
		mr = lib->reg_mr(device->pd, (void *)(uintptr_t)(reg->address + begin),
				 length, access);
	return mr;
}

static const char *remedy(const struct memory *memory, int no)
{
	if (no == ENOMEM)
		return " (is LimitMEMLOCK high enough?)";
	return is_device(memory) ? " (a dma-buf of it, or the module nvidia_peermem?)" : "";
}

static int register_piece(struct verbs_reg *reg, struct verbs_device *device, uint32_t i)
{
	const struct memory *memory = reg->base.memory;
	uint64_t begin = (uint64_t)i << reg->shift;
	uint64_t length = memory->length - begin;
	int access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
	struct ibv_mr *mr;

	if (length > UINT64_C(1) << reg->shift)
		length = UINT64_C(1) << reg->shift;
	if (memory->writable && !is_device(memory))
		access |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	mr = is_device(memory)
		     ? register_device(reg, device, begin, length, access)
		     : transport_of(reg)->lib->reg_mr(device->pd, memory->base + begin, length,
						      access);
	if (!mr)
		return err_raise(errno == ENOMEM ? ERR_NOMEM : ERR_IMPORT,
				 "verbs: %s does not register %ju bytes: %s%s", device->name,
				 (uintmax_t)length, strerror(errno), remedy(memory, errno));
	reg->mr[device->index][i] = mr;
	return 0;
}

static int register_all(struct verbs_reg *reg)
{
	struct verbs_transport *transport = transport_of(reg);
	int r = 0;

	for (uint32_t i = 0; i < transport->device_count && r == 0; i++)
		for (uint32_t j = 0; j < reg->pieces && r == 0; j++)
			r = register_piece(reg, &transport->devices[i], j);
	return err_pass(r);
}

static int kind_check(const struct memory *memory)
{
	if (memory->kind == MEMORY_GUARDED)
		return err_raise(ERR_IMPORT, "verbs: a POSIX shm object can be cut by its "
					     "owner under the adapter: use a sealed memfd");
	if (memory->kind == MEMORY_VM)
		return err_raise(ERR_IMPORT, "verbs: another process's private memory cannot "
					     "be registered: use a memfd (kvd_adopt makes one "
					     "in place)");
	if (memory->length == 0 ||
	    (memory->length - 1) >> PIECE_SHIFT >= VERBS_PIECES_MAX)
		return err_raise(ERR_LIMIT, "verbs: a region of %ju bytes, at most %u pieces "
					    "of 2^%u",
				 (uintmax_t)memory->length, VERBS_PIECES_MAX, PIECE_SHIFT);
	return 0;
}

/* Pieces that every device takes. */
static int pieces_of(const struct verbs_transport *transport, uint64_t length,
		     uint8_t *shift_p, uint32_t *pieces_p)
{
	uint8_t shift = PIECE_SHIFT;
	uint64_t pieces;

	for (uint32_t i = 0; i < transport->device_count; i++)
		while (shift > 12 &&
		       transport->devices[i].attr.max_mr_size < UINT64_C(1) << shift)
			shift--;
	pieces = ((length - 1) >> shift) + 1;
	if (pieces > VERBS_PIECES_MAX)
		return err_raise(ERR_IMPORT,
				 "verbs: %ju bytes are more than %u registrations of %ju",
				 (uintmax_t)length, VERBS_PIECES_MAX,
				 (uintmax_t)UINT64_C(1) << shift);
	*shift_p = shift;
	*pieces_p = (uint32_t)pieces;
	return 0;
}

int verbs_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p)
{
	static atomic_uint_fast64_t ids;
	struct verbs_reg *reg;
	uint32_t pieces = 0;
	uint8_t shift = 0;
	int r = kind_check(memory);

	if (r == 0)
		r = pieces_of(container_of(base, struct verbs_transport, net.base),
			      memory->length, &shift, &pieces);
	if (r < 0)
		return err_pass(r);
	reg = mem_zalloc(sizeof(*reg));
	if (!reg)
		return err_pass(-ENOMEM);
	reg->base.transport = base;
	reg->base.memory = memory_ref(memory);
	reg->address = is_device(memory) ? memory->address
					 : (uint64_t)(uintptr_t)memory->base;
	reg->shift = shift;
	reg->pieces = pieces;
	atomic_init(&reg->refs, 1);
	reg->id = atomic_fetch_add(&ids, 1) + 1;
	reg->job.work = release_work;
	reg->job.done = release_done;
	reg->near = verbs_topo_near(container_of(base, struct verbs_transport, net.base), memory);
	r = register_all(reg);
	if (r < 0) {
		release(reg);
		mem_free(reg);
		return err_pass(r);
	}
	*reg_p = (struct xp_reg *)reg;
	return 0;
}

void verbs_mem_dereg(struct xp_reg *xp_reg)
{
	struct verbs_reg *reg = (struct verbs_reg *)xp_reg;

	if (atomic_fetch_sub(&reg->refs, 1) != 1)
		return;
	release(reg);
	mem_free(reg);
}

/* Loop's thread. */
static void reg_put(struct verbs_reg *reg)
{
	if (atomic_fetch_sub(&reg->refs, 1) != 1)
		return;
	atomic_fetch_add(&transport_of(reg)->releasing, 1);
	offload_submit(transport_of(reg)->net.base.env.offload, &reg->job);
}

/* ---- keys ---- */

int verbs_key_pack(struct xp_reg *xp_reg, struct xp_peer *peer, void *buf, size_t size,
		   size_t *len_p)
{
	struct verbs_reg *reg = (struct verbs_reg *)xp_reg;
	const struct verbs_transport *transport = transport_of(reg);
	struct verbs_remote remote = {
		.id = reg->id,
		.address = reg->address,
		.length = reg->base.memory->length,
		.rails = transport->rail_count,
		.pieces = reg->pieces,
		.shift = reg->shift,
	};

	(void)peer;
	for (uint32_t i = 0; i < remote.rails; i++)
		for (uint32_t j = 0; j < remote.pieces; j++)
			remote.rkey[i][j] =
				reg->mr[transport->rails[i].device->index][j]->rkey;
	return err_pass(verbs_remote_put(&remote, buf, size, len_p));
}

int verbs_key_unpack(struct xp_peer *peer, const void *buf, size_t len, void *owner,
		     struct xp_key **key_p)
{
	struct verbs_remote remote;
	struct verbs_key *key;
	int r = verbs_remote_get(buf, len, &remote);

	if (r < 0)
		return err_pass(r);
	key = mem_zalloc(sizeof(*key));
	if (!key)
		return err_pass(-ENOMEM);
	key->base = (struct xp_key_base){.peer = peer, .ready = true, .owner = owner};
	key->remote = remote;
	key->refs = 1;
	*key_p = (struct xp_key *)key;
	return 0;
}

static void key_put(struct verbs_key *key)
{
	if (--key->refs == 0)
		mem_free(key);
}

void verbs_key_drop(struct xp_key *key)
{
	key_put((struct verbs_key *)key);
}

/* ---- a transfer's tables ---- */

static uint32_t buffer_of(const struct plan_run *run, bool is_src)
{
	return is_src ? run->src_buffer : run->dst_buffer;
}

static bool rails_covered(const struct verbs_key *key, const struct verbs_peer *peer)
{
	for (uint32_t i = 0; i < peer->qp_count; i++)
		if (peer->qps[i].rail->index >= key->remote.rails)
			return false;
	return true;
}

static int remote_check(const struct xp_buffer *buffer, const struct verbs_peer *peer,
			uint32_t number)
{
	const struct verbs_key *key = (const struct verbs_key *)buffer->key;

	if (!key)
		return err_raise(ERR_NOTFOUND, "verbs: no key of the peer's buffer %u",
				 number);
	if (key->base.peer != (const struct xp_peer *)peer)
		return err_raise(ERR_INVAL, "verbs: buffer %u: a key of another connection",
				 number);
	if (!rails_covered(key, peer))
		return err_raise(ERR_PROTO, "verbs: buffer %u: a key of %u rails", number,
				 key->remote.rails);
	if (buffer->offset > key->remote.length ||
	    buffer->length > key->remote.length - buffer->offset)
		return err_raise(ERR_RANGE,
				 "verbs: the peer's buffer %u: %ju + %ju bytes are beyond its "
				 "memory's %ju",
				 number, (uintmax_t)buffer->offset,
				 (uintmax_t)buffer->length, (uintmax_t)key->remote.length);
	return 0;
}

/* A table may have holes where this plan has no rows. */
static int named_check(const struct plan *plan, const struct xp_buffer *buffers,
		       bool is_src, const struct verbs_peer *remote_of)
{
	uint32_t last = UINT32_MAX;
	int r = 0;

	for (size_t i = 0; i < plan->run_count && r == 0; i++) {
		uint32_t number = buffer_of(&plan->runs[i], is_src);

		if (number == last)
			continue;
		last = number;
		if (remote_of)
			r = remote_check(&buffers[number], remote_of, number);
		else if (!buffers[number].reg)
			r = err_raise(ERR_INVAL, "verbs: buffer %u is not registered",
				      number);
		else if (!is_src && is_device(((const struct xp_reg_base *)buffers[number].reg)
						      ->memory))
			r = err_raise(ERR_IMPORT,
				      "verbs: buffer %u is a GPU's: an adapter may read it, "
				      "but not write it (transports = tcp stages it)",
				      number);
	}
	return err_pass(r);
}

int verbs_places_init(struct verbs_places *places, const struct plan *plan,
		      const struct xp_buffer *buffers, uint32_t count, bool is_src,
		      const struct verbs_peer *remote_of)
{
	int r;

	*places = (struct verbs_places){0};
	r = named_check(plan, buffers, is_src, remote_of);
	if (r < 0)
		return err_pass(r);
	places->at = mem_calloc(count, sizeof(*places->at));
	if (!places->at)
		return err_pass(-ENOMEM);
	places->count = count;
	for (uint32_t i = 0; i < count; i++) {
		struct verbs_place *at = &places->at[i];

		at->offset = buffers[i].offset;
		if (remote_of) {
			at->key = (struct verbs_key *)buffers[i].key;
			if (at->key)
				at->key->refs++;
		} else {
			at->reg = (struct verbs_reg *)buffers[i].reg;
			if (at->reg)
				atomic_fetch_add(&at->reg->refs, 1);
		}
	}
	return 0;
}

void verbs_places_fini(struct verbs_places *places)
{
	for (uint32_t i = 0; i < places->count; i++) {
		if (places->at[i].reg)
			reg_put(places->at[i].reg);
		if (places->at[i].key)
			key_put(places->at[i].key);
	}
	mem_free(places->at);
	*places = (struct verbs_places){0};
}

uint64_t verbs_places_digest(const struct verbs_places *places, const struct plan *plan,
			     bool is_src)
{
	uint64_t words[4] = {plan->digest};
	uint32_t last = UINT32_MAX;

	for (size_t i = 0; i < plan->run_count; i++) {
		uint32_t number = buffer_of(&plan->runs[i], is_src);
		const struct verbs_place *at = &places->at[number];

		if (number == last)
			continue;
		last = number;
		words[1] = number;
		words[2] = at->reg ? at->reg->id : at->key->remote.id;
		words[3] = at->offset;
		words[0] = XXH3_64bits(words, sizeof(words));
	}
	return words[0];
}
