/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Private memory of a peer's engine (vm), read in place.
 *
 * Such memory has no file to map, so both daemons would have to take part: one fills
 * slots, the other empties them (shm_ring.c), and each slot crosses from one core's cache
 * to another's. Where the owner's daemon may open the process's memory by itself, it
 * passes that, opened for reading, and the destination's daemon does all of the copying,
 * as with a file. The daemon that opens it must have the right to: the requester needs
 * none, and cannot be made to read on behalf of others.
 *
 * An obstacle (Yama, a process that may not be dumped, no number of it in our pid
 * namespace) is no fault: the key is usable and its bytes pass through the ring, and the
 * path reports it. `vm_direct = no` selects that.
 */
#include <fcntl.h>

#include "daemon/base/log.h"
#include "daemon/memory/vm.h"
#include "daemon/transport/shm/shm_private.h"

/* ---- the side that receives the request ---- */

int shm_vm_open(const struct memory *memory)
{
	const struct memory_owner *owner = &memory->owner;
	int fd = -1;

	if (owner->pid <= 0 || owner->pidfd < 0 || vm_open(owner, O_RDONLY, &fd) < 0) {
		err_clear();
		return -1;
	}
	return fd;
}

void shm_vm_key_give(struct shm_peer *peer, uint64_t id, const struct memory *memory,
		     int owned_fd)
{
	uint8_t body[16];
	struct cursor c;

	cursor_write(&c, body, sizeof(body));
	cursor_put_u64(&c, memory->address);
	cursor_put_u64(&c, memory->length);
	shm_send(peer, &(struct shm_frame){.type = SHM_KEY_GIVE_VM,
					   .id = id,
					   .body = body,
					   .body_len = sizeof(body),
					   .fd = owned_fd});
}

/* ---- the asking side ---- */

int shm_on_key_give_vm(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	uint64_t address = cursor_get_u64(c), length = cursor_get_u64(c);
	struct shm_key *key = NULL;
	int r = shm_key_answered(peer, f->id, &key);

	if (r == 0 && !key->vm)
		r = err_raise(ERR_PROTO, "private memory for a key that names a file");
	if (r < 0)
		return err_pass(r);
	key->kind = MEMORY_VM;
	key->offset = address;
	shm_key_given(key, length, shm_wire_take_fd(peer));
	return 0;
}

void shm_vm_map(struct shm_key *key)
{
	if (memory_import_vm(&key->owner, key->fd, key->offset, key->length,
			     &key->memory) == 0) {
		key->memory->writable = false;
		return;
	}
	log_debug("shm", NULL, "private memory is copied through the bounce ring",
		  "why=\"%s\"", err_last()->text);
	err_clear();
}
