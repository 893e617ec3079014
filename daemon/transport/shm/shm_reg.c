/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Registered memory, and how a peer maps it.
 *
 * A packed key is the number of a registration and a random nonce: a right to request,
 * which only daemons have that received the key in REGISTER. The requester gets the file,
 * reopened for reading only (a new open file description, so no F_SETFL or reopening
 * through ours changes that; whether the file's mode lets the requester open it for
 * writing is the engine's choice). The requester maps and populates it on a helper
 * thread, and from then on reads it by itself; the transfers decide whether the bytes
 * read count.
 *
 * Memory without a file, or with one that we may not open for reading, has a key too: it
 * states that the bytes pass through the ring, or that its process may be requested
 * (shm_vm.c).
 *
 * Registering runs on helper threads, hence the one lock; the rest is the loop's. A key
 * outlives its drop while an answer or a helper holds it.
 */
#include "daemon/transport/shm/shm_private.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"

#define KEY_BYTES (1u + 1u + 8u + 16u + 8u) /* version, flags, number, nonce, length */
enum { KEY_FLAG_FILE = 1, KEY_FLAG_GPU = 2, KEY_FLAG_VM = 4 };

/* ---- registrations ---- */

/* -1 where the memory has no file, the file's mode forbids it, or its owner holds a lease
 * on it, which is not waited for. */
static int reopen_read_only(const struct memory *memory)
{
	char path[64];

	if (memory->fd < 0)
		return -1;
	snprintf(path, sizeof(path), "/proc/self/fd/%d", memory->fd);
	return open(path, O_RDONLY | O_NONBLOCK | O_CLOEXEC);
}

int shm_mem_reg(struct transport *transport, struct memory *memory, struct xp_reg **reg_p)
{
	struct shm *shm = container_of(transport, struct shm, net.base);
	struct shm_reg *reg;

	if (memory_check_copyable(memory) < 0)
		return err_pass(-ENOTSUP);
	reg = mem_zalloc(sizeof(*reg));
	if (!reg)
		return err_pass(-ENOMEM);
	reg->base.transport = transport;
	reg->base.memory = memory_ref(memory);
	shm_random(reg->nonce, sizeof(reg->nonce));
	reg->ro_fd = memory->kind == MEMORY_VM && shm->vm_direct
			     ? shm_vm_open(memory)
			     : reopen_read_only(memory);
	if (reg->ro_fd < 0 && memory->fd >= 0)
		log_warn("shm", NULL,
			 "memory will be staged: its file cannot be opened for reading",
			 "reason=\"%s\"", strerror(errno));
	pthread_mutex_lock(&shm->regs_lock);
	reg->id = ++shm->next_reg;
	list_push_back(&shm->regs[reg->id % SHM_REG_BUCKETS], &reg->link);
	pthread_mutex_unlock(&shm->regs_lock);
	*reg_p = (struct xp_reg *)(void *)reg;
	return 0;
}

void shm_mem_dereg(struct xp_reg *xreg)
{
	struct shm_reg *reg = (struct shm_reg *)(void *)xreg;
	struct shm *shm = container_of(reg->base.transport, struct shm, net.base);

	pthread_mutex_lock(&shm->regs_lock);
	list_remove(&reg->link);
	pthread_mutex_unlock(&shm->regs_lock);
	mem_closep(&reg->ro_fd);
	memory_unref(reg->base.memory);
	mem_free(reg);
}

/* GPU memory with a handle that may be passed. */
static bool reg_of_gpu(const struct shm_reg *reg)
{
	return reg->base.memory->kind == MEMORY_DEVICE &&
	       ((const struct shm *)(const void *)reg->base.transport)->gpu;
}

/* Private memory of an engine, which the peer may read by himself. */
static bool reg_of_vm(const struct shm_reg *reg)
{
	return reg->base.memory->kind == MEMORY_VM && reg->ro_fd >= 0;
}

int shm_key_pack(struct xp_reg *xreg, struct xp_peer *peer, void *buf, size_t size,
		 size_t *len_p)
{
	const struct shm_reg *reg = (const struct shm_reg *)(const void *)xreg;
	struct cursor c;

	(void)peer;
	if (size < KEY_BYTES)
		return err_raise(ERR_TOOBIG, "shm: key of %u bytes, buffer of %zu",
				 KEY_BYTES, size);
	cursor_write(&c, buf, size);
	cursor_put_u8(&c, SHM_VERSION);
	cursor_put_u8(&c, reg_of_vm(reg)    ? KEY_FLAG_VM
			  : reg_of_gpu(reg) ? KEY_FLAG_GPU
			  : reg->ro_fd >= 0 ? KEY_FLAG_FILE
					    : 0);
	cursor_put_u64(&c, reg->id);
	cursor_put_bytes(&c, reg->nonce, sizeof(reg->nonce));
	cursor_put_u64(&c, reg->base.memory->length);
	*len_p = c.pos;
	return 0;
}

/* The parts of a registration that others may get; copied out under the lock, because a
 * helper may deregister at any time. */
struct grant {
	struct memory *memory; /* a reference */
	int fd;		       /* owned, -1: none */
	int fd_errno;	       /* why there is none; 0: it has none */
};

static int reg_grant(struct shm *shm, uint64_t id, const uint8_t nonce[16],
		     struct grant *grant_p)
{
	struct shm_reg *reg;
	int r = err_raise(ERR_REVOKED, "shm: the memory is not registered");

	pthread_mutex_lock(&shm->regs_lock);
	list_foreach(reg, &shm->regs[id % SHM_REG_BUCKETS], link) {
		if (reg->id != id || !mem_equal(reg->nonce, nonce, sizeof(reg->nonce)))
			continue;
		grant_p->memory = memory_ref(reg->base.memory);
		grant_p->fd = reg->ro_fd < 0 ? -1 : fcntl(reg->ro_fd, F_DUPFD_CLOEXEC, 3);
		grant_p->fd_errno = reg->ro_fd >= 0 && grant_p->fd < 0 ? errno : 0;
		r = 0;
		break;
	}
	pthread_mutex_unlock(&shm->regs_lock);
	return r;
}

/* ---- keys ---- */

static const struct sm_state key_states[SHM_KEY_STATES] = {
	[SHM_KEY_WAITING] = {"waiting", SM_TO(SHM_KEY_ASKED) | SM_TO(SHM_KEY_DEAD)},
	[SHM_KEY_ASKED] = {"asked", SM_TO(SHM_KEY_MAPPING) | SM_TO(SHM_KEY_READY) |
					    SM_TO(SHM_KEY_DEAD)},
	[SHM_KEY_MAPPING] = {"mapping", SM_TO(SHM_KEY_READY) | SM_TO(SHM_KEY_DEAD)},
	[SHM_KEY_READY] = {"ready", 0},
	[SHM_KEY_DEAD] = {"dead", 0},
};

static const struct sm_table key_table = {
	.name = "shm key", .states = key_states, .count = SHM_KEY_STATES};

static void key_free(struct shm_key *key)
{
	list_remove(&key->link);
	if (key->memory)
		memory_release(key->offload, key->memory);
	mem_closep(&key->fd);
	mem_free(key);
}

/* The key of this daemon's own memory needs no file. */
static int key_resolve_self(struct shm_key *key)
{
	struct grant grant = {.fd = -1};
	int r = reg_grant(key->peer->shm, key->reg_id, key->nonce, &grant);

	if (r < 0)
		return err_pass(r);
	mem_closep(&grant.fd);
	key->memory = grant.memory;
	return 0;
}

static int key_parse(struct shm_key *key, const void *buf, size_t len, bool *ask_p)
{
	struct cursor c;
	const void *nonce;
	uint8_t version, flags;
	int r;

	cursor_read(&c, buf, len);
	version = cursor_get_u8(&c);
	flags = cursor_get_u8(&c);
	key->vm = flags == KEY_FLAG_VM && key->peer->shm->vm_direct;
	*ask_p = key->vm || (flags & (KEY_FLAG_FILE | KEY_FLAG_GPU));
	key->reg_id = cursor_get_u64(&c);
	nonce = cursor_get_bytes(&c, sizeof(key->nonce));
	key->length = cursor_get_u64(&c);
	r = cursor_check(&c, "shm key");
	if (r < 0)
		return err_pass(r);
	if (version != SHM_VERSION || key->length == 0 || key->length > INT64_MAX)
		return err_raise(ERR_PROTO, "shm key: version %u, %ju bytes", version,
				 (uintmax_t)key->length);
	memcpy(key->nonce, nonce, sizeof(key->nonce));
	return 0;
}

int shm_key_unpack(struct xp_peer *xpeer, const void *buf, size_t len, void *owner,
		   struct xp_key **key_p)
{
	struct shm_peer *peer = (struct shm_peer *)(void *)xpeer;
	struct shm_key *key;
	bool ask = false;
	int r;

	if (!net_peer_live(&peer->net))
		return err_raise(ERR_PEER, "shm: connection to the peer lost");
	key = mem_zalloc(sizeof(*key));
	if (!key)
		return err_pass(-ENOMEM);
	list_init(&key->link);
	key->base.peer = xpeer;
	key->base.owner = owner;
	key->peer = peer;
	key->offload = peer->shm->net.base.env.offload;
	key->gpus = peer->shm->net.base.env.gpu;
	key->fd = -1;
	r = key_parse(key, buf, len, &ask);
	if (r == 0 && peer->self)
		r = key_resolve_self(key);
	if (r < 0) {
		key_free(key);
		return err_pass(r);
	}
	key->base.ready = !ask || peer->self;
	sm_init(&key->sm, &key_table, key->base.ready ? SHM_KEY_READY : SHM_KEY_WAITING);
	list_push_back(key->base.ready ? &peer->held : &peer->keys, &key->link);
	shm_keys_pump(peer);
	*key_p = (struct xp_key *)(void *)key;
	return 0;
}

void shm_key_drop(struct xp_key *xkey)
{
	struct shm_key *key = (struct shm_key *)(void *)xkey;

	key->dropped = true;
	if (!key->mapping && sm_state(&key->sm) != SHM_KEY_ASKED)
		key_free(key);
}

void shm_keys_pump(struct shm_peer *peer)
{
	while (shm_peer_ready(peer) && peer->asked_count < SHM_KEYS_ASKED &&
	       !list_empty(&peer->keys)) {
		struct shm_key *key =
			list_entry(list_pop_front(&peer->keys), struct shm_key, link);
		uint8_t body[24];
		struct cursor c;

		sm_move(&key->sm, SHM_KEY_ASKED);
		key->handle = ++peer->key_serial;
		list_push_back(&peer->asked, &key->link);
		peer->asked_count++;
		cursor_write(&c, body, sizeof(body));
		cursor_put_u64(&c, key->reg_id);
		cursor_put_bytes(&c, key->nonce, sizeof(key->nonce));
		shm_send(peer, &(struct shm_frame){.type = SHM_KEY_ASK,
						   .id = key->handle,
						   .body = body,
						   .body_len = sizeof(body)});
	}
}

/* ---- the side that receives the request ---- */

int shm_on_key_ask(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint64_t reg_id = cursor_get_u64(c);
	const uint8_t *nonce = cursor_get_bytes(c, 16);
	struct grant grant = {.fd = -1};
	uint8_t body[17];
	struct cursor out;
	struct err err;
	int r = reg_grant(peer->shm, reg_id, nonce, &grant);

	if (r == 0 && grant.memory->kind == MEMORY_DEVICE && peer->shm->gpu) {
		local_key_give(peer, f->id, grant.memory);
		memory_release(peer->shm->net.base.env.offload, grant.memory);
		return 0;
	}
	if (r == 0 && grant.memory->kind == MEMORY_VM && grant.fd >= 0) {
		shm_vm_key_give(peer, f->id, grant.memory, grant.fd);
		memory_release(peer->shm->net.base.env.offload, grant.memory);
		return 0;
	}
	if (r == 0 && grant.fd_errno)
		r = err_raise_errno(grant.fd_errno, "shm: duplicating the memory's fd");
	else if (r == 0 && grant.fd < 0)
		r = err_raise(ERR_IMPORT, "shm: the memory's file cannot be passed");
	if (r < 0) {
		err_take(&err);
		shm_send_err(peer, SHM_KEY_DENY, f->id, &err);
	} else {
		cursor_write(&out, body, sizeof(body));
		cursor_put_u8(&out, grant.memory->kind == MEMORY_GUARDED);
		cursor_put_u64(&out, grant.memory->fd_offset);
		cursor_put_u64(&out, grant.memory->length);
		shm_send(peer, &(struct shm_frame){.type = SHM_KEY_GIVE,
						   .id = f->id,
						   .body = body,
						   .body_len = sizeof(body),
						   .fd = grant.fd});
		grant.fd = -1; /* given away */
	}
	mem_closep(&grant.fd);
	if (grant.memory)
		memory_release(peer->shm->net.base.env.offload, grant.memory);
	return 0;
}

/* ---- the asking side ---- */

static void key_tell(struct shm_key *key, const struct err *err)
{
	const struct xp_callbacks *cb = &key->peer->shm->net.base.callbacks;

	sm_move(&key->sm, err ? SHM_KEY_DEAD : SHM_KEY_READY);
	key->base.ready = !err;
	cb->on_key(cb->owner, (struct xp_key *)(void *)key, err);
}

/* On a helper thread, as all of key_map(): the peer may be freed meanwhile. */
static int sealed_key_map(struct shm_key *key)
{
	int r = memory_import_memfd(key->fd, key->offset, key->length, false,
				    &key->memory);

	if (r == 0)
		memory_offer(key->memory, key->gpus);
	return err_pass(r);
}

static void key_map(struct offload_job *job)
{
	struct shm_key *key = container_of(job, struct shm_key, job);
	int r = 0;

	if (key->kind == MEMORY_VM)
		shm_vm_map(key);
	else if (key->kind == MEMORY_DEVICE)
		r = local_key_map(key);
	if (r == 0 && key->kind == MEMORY_GUARDED)
		r = memory_import_shm_fd(key->fd, key->offset, key->length, false,
					 &key->memory);
	else if (r == 0 && key->kind == MEMORY_SEALED)
		r = sealed_key_map(key);
	job->result = r;
	if (r < 0)
		err_take(&job->err);
}

static void key_mapped(struct offload_job *job)
{
	struct shm_key *key = container_of(job, struct shm_key, job);

	key->mapping = false;
	mem_closep(&key->fd);
	if (key->dropped) {
		key_free(key);
	} else if (sm_state(&key->sm) ==
		   SHM_KEY_MAPPING) { /* else lost: on_key has been */
		if (key->vm && key->memory)
			snprintf(key->peer->net.base.path,
				 sizeof(key->peer->net.base.path), "memfd + vm");
		key_tell(key, job->result < 0 ? &job->err : NULL);
	}
}

int shm_key_answered(struct shm_peer *peer, uint64_t handle, struct shm_key **key_p)
{
	struct shm_key *key = list_first(&peer->asked, struct shm_key, link);

	if (!key || key->handle != handle)
		return err_raise(ERR_PROTO, "for key %ju, which was not requested",
				 (uintmax_t)handle);
	list_remove(&key->link);
	list_push_back(&peer->held, &key->link);
	peer->asked_count--;
	shm_keys_pump(peer);
	*key_p = key;
	return 0;
}

static int given_check(const struct shm_key *key, uint64_t length)
{
	if (length != key->length)
		return err_raise(ERR_RANGE,
				 "shm: the key was for %ju bytes, the memory has %ju",
				 (uintmax_t)key->length, (uintmax_t)length);
	if (key->fd < 0 &&
	    (key->kind != MEMORY_DEVICE || key->gpu.kind == GPU_HANDLE_VMM))
		return err_raise(ERR_LIMIT,
				 "shm: out of file descriptors for the peer's memory");
	return 0;
}

void shm_key_given(struct shm_key *key, uint64_t length, int fd)
{
	struct err err;

	key->fd = fd;
	if (key->dropped) {
		key_free(key);
	} else if (key->vm && fd < 0 && length == key->length) {
		key_tell(key, NULL); /* staged */
	} else if (given_check(key, length) < 0) {
		err_take(&err);
		mem_closep(&key->fd);
		key_tell(key, &err);
	} else {
		sm_move(&key->sm, SHM_KEY_MAPPING);
		key->owner = (struct memory_owner){
			.warden = gates_warden(key->peer->shm->net.base.env.gates),
			.uid = key->peer->gate.uid,
			.pidfd = -1};
		key->mapping = true;
		key->job = (struct offload_job){.work = key_map,
						.done = key_mapped,
						.principal = offload_peer(key->peer)};
		offload_submit(key->offload, &key->job);
	}
}

int shm_on_key_give(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint8_t guarded = cursor_get_u8(c);
	uint64_t offset = cursor_get_u64(c), length = cursor_get_u64(c);
	struct shm_key *key = NULL;
	int r = shm_key_answered(peer, f->id, &key);

	if (r < 0)
		return err_pass(r);
	key->kind = guarded ? MEMORY_GUARDED : MEMORY_SEALED;
	key->offset = offset;
	shm_key_given(key, length, shm_wire_take_fd(peer));
	return 0;
}

int shm_on_key_deny(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	struct shm_key *key = NULL;
	struct err err;
	int r;

	shm_get_err(c, &err);
	r = cursor_check(c, "KEY_DENY");
	if (r == 0)
		r = shm_key_answered(peer, f->id, &key);
	if (r < 0)
		return err_pass(r);
	if (err.code == ERR_OK)
		err_set(&err, ERR_REVOKED, "shm: the peer refuses access to the memory");
	if (key->dropped)
		key_free(key);
	else
		key_tell(key, key->vm ? NULL : &err);
	return 0;
}

/* ---- the peer's end ---- */

/* Keys that were not usable yet never will be. */
static void keys_end(struct shm_peer *peer, struct list *from)
{
	struct list *n;

	while ((n = list_pop_front(from))) {
		struct shm_key *key = list_entry(n, struct shm_key, link);

		if (key->dropped && !key->mapping) {
			key_free(key);
			continue;
		}
		list_push_back(&peer->orphans, &key->link);
		if (!key->dropped && sm_can(&key->sm, SHM_KEY_DEAD))
			key_tell(key, &peer->net.err);
	}
}

void shm_keys_end(struct shm_peer *peer)
{
	keys_end(peer, &peer->keys);
	keys_end(peer, &peer->asked);
	keys_end(peer, &peer->held);
	peer->asked_count = 0;
}

void shm_keys_detach(struct shm_peer *peer)
{
	struct list *n;

	while ((n = list_pop_front(&peer->orphans)))
		list_entry(n, struct shm_key, link)->peer = NULL;
}
