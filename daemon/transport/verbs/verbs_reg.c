/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory of the verbs backend, and keys.
 *
 * One registration for each region and device, in pieces where a region is larger than
 * one may be. The adapter pins the pages, so only memory that cannot vanish is taken: if
 * the owner truncated a POSIX shm object, the adapter would write to freed pages and
 * report success; memory of another process cannot be registered here at all. Both are
 * staged: registered by name only, their transfers are packed (verbs_pack.c), and the key
 * tells the peer so.
 *
 * A registration lives while its owner or a transfer holds it, also at the side that only
 * responds: so a peer that received GO never uses a dead key, which would cost the
 * connection and with it every other transfer.
 *
 * Memory of a GPU: by a dma-buf first, the engine's own or one that the driver makes of
 * an import; else by its address in this process, which a peer-memory module of the
 * kernel must know (nvidia_peermem; its absence shows as a failure); else it is staged,
 * where a GPU can copy it. An adapter's writes there are read back before anything is
 * reported (verbs_loopback.c).
 *
 * No memory windows: an invalidated key ends a reliable connection just as well as
 * resetting the owner's queue pair does.
 */
#include "daemon/transport/verbs/verbs_impl.h"

#include <errno.h>
#include <string.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "gpu/import.h"

#define PAGE_BYTES UINT64_C(4096)
#define PIECE_SHIFT 36u /* 64 GiB at most; the adapter's limit, if that is less */

static struct verbs_transport *verbs_reg_transport_of(const struct verbs_reg *reg)
{
	return container_of(reg->net.base.transport, struct verbs_transport, net.base);
}

static void deregister(struct verbs_reg *reg)
{
	const struct verbs_lib *lib = verbs_reg_transport_of(reg)->lib;

	for (uint32_t i = 0; i < VERBS_RAILS_MAX; i++) {
		for (uint32_t j = 0; j < VERBS_PIECES_MAX; j++) {
			if (reg->mr[i][j])
				lib->dereg_mr(reg->mr[i][j]);
			reg->mr[i][j] = NULL;
		}
	}
}

void verbs_reg_release(struct net_reg *reg)
{
	deregister(container_of(reg, struct verbs_reg, net));
}

static bool is_device(const struct memory *memory)
{
	return memory->kind == MEMORY_DEVICE;
}

static struct ibv_mr *register_device(struct verbs_reg *reg, struct verbs_device *device,
				      uint64_t begin, uint64_t length, int access)
{
	const struct verbs_lib *lib = verbs_reg_transport_of(reg)->lib;
	const struct memory *memory = reg->net.base.memory;
	struct ibv_mr *mr = NULL;

	errno = EOPNOTSUPP;
	if (reg->dmabuf_fd >= 0 && lib->reg_dmabuf_mr)
		mr = lib->reg_dmabuf_mr(device->pd, reg->dmabuf_offset + begin, length,
					reg->address + begin, reg->dmabuf_fd, access);
	if (!mr && memory->address)
		mr = lib->reg_mr(device->pd, (void *)(uintptr_t)(reg->address + begin),
				 length, access);
	return mr;
}

static const char *remedy(const struct memory *memory, int no)
{
	if (no == ENOMEM)
		return " (is LimitMEMLOCK high enough?)";
	return is_device(memory) ? " (a dma-buf of it, or the module nvidia_peermem?)"
				 : "";
}

static int register_piece(struct verbs_reg *reg, struct verbs_device *device, uint32_t i)
{
	const struct memory *memory = reg->net.base.memory;
	uint64_t begin = (uint64_t)i << reg->shift;
	uint64_t length = memory->length - begin;
	int access = IBV_ACCESS_REMOTE_READ | IBV_ACCESS_RELAXED_ORDERING;
	struct ibv_mr *mr;

	if (length > UINT64_C(1) << reg->shift)
		length = UINT64_C(1) << reg->shift;
	if (memory->writable)
		access |= IBV_ACCESS_LOCAL_WRITE | IBV_ACCESS_REMOTE_WRITE;
	mr = is_device(memory)
		     ? register_device(reg, device, begin, length, access)
		     : verbs_reg_transport_of(reg)->lib->reg_mr(
			       device->pd, memory->base + begin, length, access);
	if (!mr)
		return err_raise(errno == ENOMEM ? ERR_NOMEM : ERR_IMPORT,
				 "verbs: %s cannot register %ju bytes: %s%s",
				 device->name, (uintmax_t)length, strerror(errno),
				 remedy(memory, errno));
	reg->mr[device->index][i] = mr;
	return 0;
}

static int register_all(struct verbs_reg *reg)
{
	struct verbs_transport *transport = verbs_reg_transport_of(reg);
	int r = 0;

	for (uint32_t i = 0; i < transport->device_count && r == 0; i++)
		for (uint32_t j = 0; j < reg->pieces && r == 0; j++)
			r = register_piece(reg, &transport->devices[i], j);
	return err_pass(r);
}

/* A piece size that every device accepts. */
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

/* The dma-buf of a GPU's memory: the engine's own, or one that the driver makes of the
 * import, which registrations need no longer than they are made. */
static void find_dmabuf(struct verbs_reg *reg, int *made_fd_p)
{
	const struct memory *memory = reg->net.base.memory;

	if (memory->dmabuf_fd >= 0) {
		reg->dmabuf_fd = memory->dmabuf_fd;
		reg->dmabuf_offset = memory->dmabuf_offset;
	} else if (memory->gpu && verbs_reg_transport_of(reg)->lib->reg_dmabuf_mr &&
		   gpu_import_dmabuf(memory->gpu, made_fd_p) == 0) {
		reg->dmabuf_fd = *made_fd_p;
		reg->dmabuf_offset = memory->address - memory->gpu->address;
	} else {
		err_clear(); /* the address is left */
	}
	/* both must lie at the same place of their pages */
	if (!memory->address)
		reg->address = reg->dmabuf_offset & (PAGE_BYTES - 1);
}

static int register_direct(struct verbs_reg *reg)
{
	cleanup_close int made_fd = -1;
	int r = pieces_of(verbs_reg_transport_of(reg), reg->net.base.memory->length,
			  &reg->shift, &reg->pieces);

	reg->dmabuf_fd = -1;
	if (r == 0 && is_device(reg->net.base.memory))
		find_dmabuf(reg, &made_fd);
	if (r == 0)
		r = register_all(reg);
	reg->dmabuf_fd = -1;
	return err_pass(r);
}

/* Why no adapter may register it, or NULL. */
static const char *why_never(const struct memory *memory)
{
	if (memory->kind == MEMORY_GUARDED && !memory->sealed)
		return "the owner can truncate a POSIX shm object while the adapter uses "
		       "it; use a sealed memfd";
	if (memory->kind == MEMORY_VM)
		return "another process's private memory cannot be registered; use a "
		       "memfd (kvd_adopt makes one in place)";
	return NULL;
}

/* The copy threads can reach it, and slots exist. */
static bool may_stage(const struct verbs_reg *reg)
{
	const struct memory *memory = reg->net.base.memory;

	return verbs_reg_transport_of(reg)->pack_pool &&
	       (is_device(memory) ? memory->gpu != NULL : why_never(memory) != NULL);
}

static int reg_make(struct verbs_reg *reg)
{
	const struct memory *memory = reg->net.base.memory;
	const char *never = why_never(memory);
	int r;

	if (memory->length == 0)
		return err_raise(ERR_RANGE, "verbs: a region of no bytes");
	r = never ? err_raise(ERR_IMPORT, "verbs: %s", never) : register_direct(reg);
	if (r == 0 || !may_stage(reg))
		return err_pass(r);
	deregister(reg);
	reg->pieces = 0;
	reg->shift = 0;
	reg->address = 0; /* it is unused, and no peer may see it */
	log_info("verbs", NULL, "memory is staged", "bytes=%ju why=\"%s\"",
		 (uintmax_t)memory->length, err_last()->text);
	err_clear();
	return 0;
}

int verbs_mem_reg(struct transport *base, struct memory *memory, struct xp_reg **reg_p)
{
	struct verbs_reg *reg;
	int r = net_reg_new(base, memory, sizeof(*reg), &reg);

	if (r < 0)
		return err_pass(r);
	reg->address =
		is_device(memory) ? memory->address : (uint64_t)(uintptr_t)memory->base;
	reg->near = verbs_topo_near(container_of(base, struct verbs_transport, net.base),
				    memory);
	r = reg_make(reg);
	if (r < 0) {
		net_mem_dereg((struct xp_reg *)reg);
		return err_pass(r);
	}
	*reg_p = (struct xp_reg *)reg;
	return 0;
}

/* ---- keys ---- */

int verbs_key_pack(struct xp_reg *xp_reg, struct xp_peer *peer, void *buf, size_t size,
		   size_t *len_p)
{
	struct verbs_reg *reg = (struct verbs_reg *)xp_reg;
	const struct verbs_transport *transport = verbs_reg_transport_of(reg);
	struct verbs_remote remote = {
		.id = reg->net.id,
		.address = reg->address,
		.length = reg->net.base.memory->length,
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

void verbs_key_put(struct verbs_key *key)
{
	if (--key->refs == 0)
		mem_free(key);
}

void verbs_key_drop(struct xp_key *key)
{
	verbs_key_put((struct verbs_key *)key);
}
