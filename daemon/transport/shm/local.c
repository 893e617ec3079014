/* SPDX-License-Identifier: Apache-2.0 */
/*
 * local is shm with keys of GPU memory, too.
 *
 * All that shm promises rests on one thing: the destination's daemon does every copy.
 * That is as true when its GPU copies, so requests, answers and fences are shm's, on a
 * socket of local's own, and host memory is copied between the same two daemons as in
 * shm. The difference is how the destination's daemon reaches the source: it receives the
 * engine's own handle (an IPC handle, or the fd of VMM memory), opens it on a helper
 * thread, and reads. A handle is given only to a daemon that shows the nonce of a
 * registration, on the socket that the handshake's token opened; never in the key that
 * REGISTER carries.
 *
 * CUDA IPC opens memory for writing, too. That a peer's memory is only read is
 * copier_submit()'s promise; VMM memory is mapped for reading where the device
 * can do that.
 *
 * A handle that cannot be opened here fails its key with the reason, and so the room that
 * needs it: staging would work, but slower, and the reason would be hidden. Without peer
 * access between two GPUs the driver copies through host memory; the log reports that
 * once.
 */
#include "daemon/transport/shm/local.h"

#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>

#include "daemon/config/config.h"
#include "daemon/transport/shm/shm_private.h"
#include "gpu/gpu.h"
#include "gpu/import.h"

/* ---- keys ---- */

void local_key_give(struct shm_peer *peer, uint64_t id, const struct memory *memory)
{
	const struct gpu_import *im = memory->gpu;
	struct shm_frame frame = {.type = SHM_KEY_GIVE_IPC, .id = id, .fd = -1};
	uint8_t body[LOCAL_KEY_BYTES];
	struct cursor c;

	if (im->handle.kind == GPU_HANDLE_VMM) {
		frame.type = SHM_KEY_GIVE_VMM;
		frame.fd = fcntl(im->handle.fd, F_DUPFD_CLOEXEC, 3);
		if (frame.fd < 0) {
			struct err err;

			err_raise_errno(errno, "local: duplicating the memory's fd");
			err_take(&err);
			shm_send_err(peer, SHM_KEY_DENY, id, &err);
			return;
		}
	}
	cursor_write(&c, body, sizeof(body));
	cursor_put_bytes(&c, im->device->uuid.bytes, CU_UUID_BYTES);
	cursor_put_bytes(&c, im->handle.ipc.reserved, CU_IPC_BYTES);
	cursor_put_u64(&c, im->bytes);
	cursor_put_u64(&c, memory->address - im->address);
	cursor_put_u64(&c, memory->length);
	frame.body = body;
	frame.body_len = sizeof(body);
	shm_send(peer, &frame);
}

int local_on_key_give(struct shm_peer *peer, const struct shm_frame *f, struct cursor *c)
{
	bool vmm = f->type == SHM_KEY_GIVE_VMM;
	const void *uuid = cursor_get_bytes(c, CU_UUID_BYTES);
	const void *ipc = cursor_get_bytes(c, CU_IPC_BYTES);
	uint64_t bytes = cursor_get_u64(c), offset = cursor_get_u64(c);
	uint64_t length = cursor_get_u64(c);
	struct shm_key *key = NULL;
	struct cu_uuid name;
	int r = cursor_check(c, "KEY_GIVE");

	if (r == 0 && !peer->shm->gpu)
		r = err_raise(ERR_PROTO,
			      "GPU memory on a connection that does not support it");
	if (r == 0)
		r = shm_key_answered(peer, f->id, &key);
	if (r < 0)
		return err_pass(r);
	key->kind = MEMORY_DEVICE;
	key->offset = offset;
	key->gpu = (struct gpu_handle){
		.kind = vmm ? GPU_HANDLE_VMM : GPU_HANDLE_IPC, .fd = -1, .bytes = bytes};
	memcpy(&key->gpu.ipc, ipc, CU_IPC_BYTES);
	memcpy(name.bytes, uuid, CU_UUID_BYTES);
	cudrv_uuid_text(&name, key->gpu.device);
	key->gpu_owner = peer->gpu_owner;
	shm_key_given(key, length, vmm ? shm_wire_take_fd(peer) : -1);
	return 0;
}

/* On a helper thread. */
int local_key_map(struct shm_key *key)
{
	int r;

	key->gpu.fd = key->fd;
	r = memory_import_device(key->gpus, key->gpu_owner, &key->gpu, key->offset,
				 key->length, false, &key->memory);
	return err_prefix(r, "local: opening the peer's memory");
}

/* ---- the transport ---- */

static int local_probe(const struct config *config, uint32_t *caps_p)
{
	void *library;

	if (!config || strcmp(config->gpu, "off") == 0)
		return err_raise(ERR_REQUIRE, "local: GPUs are switched off (gpu = off)");
	/* there, and no more: starting the driver takes time and memory */
	library = dlopen(config->cuda_library, RTLD_LAZY | RTLD_LOCAL | RTLD_NODELETE);
	if (!library)
		return err_raise(ERR_REQUIRE, "local: no CUDA driver: %s", dlerror());
	dlclose(library);
	return err_pass(shm_probe(config, caps_p));
}

static int local_open(const struct xp_env *env, const struct xp_callbacks *callbacks,
		      struct transport **transport_p)
{
	uint32_t caps = 0;
	int r = local_probe(env->config, &caps);

	if (r == 0 && !env->gpu)
		r = err_raise(ERR_REQUIRE, "local: this daemon uses no GPUs");
	if (r == 0)
		r = shm_open_as(&local_transport, env, callbacks, transport_p);
	if (r < 0)
		return err_pass(r);
	container_of(*transport_p, struct shm, net.base)->gpu = true;
	(*transport_p)->caps &= ~(uint32_t)XP_CAP_ALONE; /* GPUs of the other's copy */
	return 0;
}

const struct transport_ops local_transport = {
	.name = "local",
	.probe = local_probe,
	.open = local_open,
	SHM_SLOTS,
};
