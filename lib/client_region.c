/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Memory that the daemon may use. A region keeps the arguments of its registration, and a
 * duplicate of its descriptor, so that kvd_reconnect() can register it with another
 * daemon.
 *
 * Plain memory (`vm`) is passed with this process's /proc/self/mem. The process that
 * opened it counts, so the daemon needs no right of its own. A daemon of the same user
 * may open it once more, for other daemons to read; Yama permits that for one named
 * process: the one that the kernel reports as the sender of the reply to hello. This
 * process's /proc/self/statm is passed along: with it the daemon detects that the memory
 * has been freed before the process has exited, even if /proc hides the process from it.
 */
#include "lib/client.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/prctl.h>

#include "proto/base64.h"
#include "lib/client_adopt.h"

#define REGION_FDS 2u

/* One handle; several handles may share the daemon's id, which counts them. */
struct kvd_region {
	struct client_object object;
	enum kvd_region_kind kind;
	int fd;	   /* duplicate (memfd), for kvd_reconnect(); vm: while it is sent */
	int statm; /* while it is sent */
	char shm_name[256];
	char name[64];
	char device[64];
	char ipc_handle[BASE64_CHARS(KVD_IPC_BYTES) + 1];
	uint64_t offset, bytes, address, allocation;
};

static void region_fini(struct client_object *object)
{
	struct kvd_region *region = container_of(object, struct kvd_region, object);

	mem_closep(&region->fd);
	mem_closep(&region->statm);
	mem_free(region);
}

static void op_fd(struct client_op *op, const char *name, int fd, int fds[REGION_FDS])
{
	if (fd < 0)
		return;
	out_number(&op->text, name, op->fd_count);
	fds[op->fd_count++] = fd;
	op->fds = fds;
}

/* `fds` is used until the operation is run. */
static void region_op(struct kvd_region *region, struct client_op *op,
		      int fds[REGION_FDS])
{
	static const char *const kinds[] = {"memfd",	"shm",	  "vm",	 "cuda_ipc",
					    "cuda_vmm", "dmabuf", "file"};

	client_op_begin(region->object.client, op, "region.register");
	out_text(&op->text, "kind", kinds[region->kind]);
	out_id(&op->text, "length", region->bytes);
	op_fd(op, "fd", region->fd, fds);
	op_fd(op, "statm", region->statm, fds);
	out_filled(&op->text, "shm_name", region->shm_name);
	out_filled(&op->text, "device", region->device);
	out_filled(&op->text, "handle", region->ipc_handle);
	if (region->allocation)
		out_id(&op->text, "allocation", region->allocation);
	out_some(&op->text, "offset", region->offset);
	if (region->address)
		out_id(&op->text, "address", region->address);
	out_filled(&op->text, "name", region->name);
	op->object = &region->object;
}

static bool has_fd(const struct kvd_region_args *a)
{
	return a->kind == KVD_REGION_MEMFD || a->kind == KVD_REGION_CUDA_VMM ||
	       a->kind == KVD_REGION_DMABUF || a->kind == KVD_REGION_FILE ||
	       (a->kind == KVD_REGION_SHM && !a->shm_name);
}

static int gpu_check(struct kvd_client *client, const struct kvd_region_args *a)
{
	if (!a->device || strlen(a->device) >= sizeof(((struct kvd_region *)0)->device))
		return client_fail(client, KVD_E_INVAL,
				   "device: missing, or longer than 63 bytes");
	if (a->kind == KVD_REGION_CUDA_IPC && !a->ipc_handle)
		return client_fail(client, KVD_E_INVAL, "ipc_handle: missing");
	if (a->kind == KVD_REGION_CUDA_VMM && !a->allocation)
		return client_fail(client, KVD_E_INVAL, "allocation: 0");
	return 0;
}

static int client_region_args_check(struct kvd_client *client,
				    const struct kvd_region_args *a)
{
	if (!a->bytes)
		return client_fail(client, KVD_E_INVAL, "bytes: 0");
	if (a->offset > UINT64_C(9007199254740991))
		return client_fail(client, KVD_E_RANGE,
				   "offset: more than 2^53 - 1 bytes");
	if (has_fd(a) && a->fd < 0)
		return client_fail(client, KVD_E_INVAL, "fd: %d", a->fd);
	switch (a->kind) {
	case KVD_REGION_MEMFD:
	case KVD_REGION_DMABUF:
		return 0;
	case KVD_REGION_CUDA_IPC:
	case KVD_REGION_CUDA_VMM:
		return gpu_check(client, a);
	case KVD_REGION_SHM:
		if (a->shm_name &&
		    (!*a->shm_name ||
		     strlen(a->shm_name) >= sizeof(((struct kvd_region *)0)->shm_name)))
			return client_fail(client, KVD_E_INVAL,
					   "shm_name: empty, or longer than 255 bytes");
		return 0;
	case KVD_REGION_FILE:
		if ((uint64_t)(uintptr_t)a->address < KVD_FILE_ADDRESS)
			return client_fail(client, KVD_E_RANGE,
					   "address: below KVD_FILE_ADDRESS");
		return 0;
	case KVD_REGION_VM:
		if (!a->address)
			return client_fail(client, KVD_E_INVAL,
					   "address: missing; required for vm");
		return 0;
	}
	return client_fail(client, KVD_E_INVAL, "kind: %d", (int)a->kind);
}

/* The daemon decides which kinds it supports; it reports the missing ones. Files of
 * /proc are ours until the registration is sent. */
static void region_open(struct kvd_region *region)
{
	pid_t daemon = region->object.client->info.pid;

	region->statm = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
	if (region->kind != KVD_REGION_VM)
		return;
	/* a kernel without Yama does not know this call, and does not need it */
	if (daemon > 0)
		(void)prctl(PR_SET_PTRACER, daemon, 0, 0, 0);
	region->fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
}

static void region_sent(struct kvd_region *region)
{
	mem_closep(&region->statm);
	if (region->kind == KVD_REGION_VM)
		mem_closep(&region->fd);
}

static int region_new(struct kvd_client *client, const struct kvd_region_args *a,
		      struct kvd_region **region_p)
{
	struct kvd_region *region = mem_zalloc(sizeof(*region));

	if (!region)
		return client_fail_nomem(client);
	region->fd = region->statm = -1;
	if (has_fd(a)) {
		region->fd = fcntl(a->fd, F_DUPFD_CLOEXEC, 0);
		if (region->fd < 0) {
			mem_free(region);
			return client_fail(client, KVD_E_INVAL, "fd %d: %s", a->fd,
					   strerror(errno));
		}
	}
	region->kind = a->kind;
	region->offset = a->offset;
	region->bytes = a->bytes;
	region->address = (uint64_t)(uintptr_t)a->address;
	if (a->kind == KVD_REGION_CUDA_IPC || a->kind == KVD_REGION_CUDA_VMM)
		snprintf(region->device, sizeof(region->device), "%s", a->device);
	if (a->kind == KVD_REGION_CUDA_IPC)
		base64_encode(a->ipc_handle, KVD_IPC_BYTES, region->ipc_handle);
	if (a->kind == KVD_REGION_CUDA_VMM)
		region->allocation = a->allocation;
	if (a->kind == KVD_REGION_SHM && a->shm_name)
		snprintf(region->shm_name, sizeof(region->shm_name), "%s", a->shm_name);
	snprintf(region->name, sizeof(region->name), "%s", a->name ? a->name : "");
	client_object_init(client, &region->object, CLIENT_REGION, region_fini);
	*region_p = region;
	return 0;
}

/* Adopted memory has a memfd, which is faster. */
static void by_memfd(struct kvd_region_args *args, int *fd_p)
{
	if (args->kind != KVD_REGION_VM ||
	    !client_adopted(args->address, args->bytes, fd_p, &args->offset))
		return;
	args->kind = KVD_REGION_MEMFD;
	args->fd = *fd_p;
}

/* Pages are charged to the process that creates them: the daemon creates none for
 * engines. */
static int client_region_present(const struct kvd_region *region)
{
	char path[sizeof(region->shm_name) + 16];
	cleanup_close int fd = -1;
	int r = 0;

	if (region->kind == KVD_REGION_MEMFD ||
	    (region->kind == KVD_REGION_SHM && !*region->shm_name)) {
		r = client_memory_present(region->fd, region->offset, region->bytes);
	} else if (region->kind == KVD_REGION_SHM && region->shm_name[0] == '/' &&
		   !strchr(region->shm_name + 1, '/')) {
		snprintf(path, sizeof(path), "/dev/shm%s", region->shm_name);
		fd = open(path, O_RDWR | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
		if (fd < 0)
			fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW | O_NONBLOCK);
		if (fd >= 0)
			r = client_memory_present(fd, region->offset, region->bytes);
	}
	return r ? client_fail(region->object.client, KVD_E_NOMEM,
			       "%zu bytes cannot be populated", (size_t)region->bytes)
		 : 0;
}

int kvd_region_register(struct kvd_client *client, const struct kvd_region_args *args,
			const struct kvd_call *call, struct kvd_region **region_p)
{
	struct kvd_region_args use = *args;
	struct kvd_region *region = NULL;
	cleanup_close int adopted_fd = -1;
	struct client_op op;
	int fds[REGION_FDS], r = client_begin(client, call);

	*region_p = NULL;
	if (!r)
		r = client_region_args_check(client, args);
	if (!r)
		by_memfd(&use, &adopted_fd);
	if (!r)
		r = region_new(client, &use, &region);
	if (!r)
		r = client_region_present(region);
	if (r) {
		if (region)
			client_object_unref(&region->object);
		return r;
	}
	*region_p = region;
	region_open(region);
	region_op(region, &op, fds);
	op.finish = client_object_made;
	r = client_op_run(client, &op, call);
	region_sent(region);
	if (r) {
		*region_p = NULL;
		client_object_unref(&region->object);
	}
	return r;
}

int kvd_region_memory(struct kvd_client *client, const struct kvd_memory *memory,
		      const struct kvd_call *call, struct kvd_region **region_p)
{
	const struct kvd_region_args args = {
		.kind = KVD_REGION_MEMFD,
		.fd = memory->fd,
		.bytes = memory->bytes,
		.address = memory->address,
	};

	return kvd_region_register(client, &args, call, region_p);
}

int kvd_region_unregister(struct kvd_region *region, const struct kvd_call *call)
{
	return client_object_close(&region->object, call);
}

int client_region_again(struct kvd_region *region)
{
	struct client_op op;
	int fds[REGION_FDS], r;

	region_open(region);
	region_op(region, &op, fds);
	r = client_session_again(&op);
	region_sent(region);
	return r;
}

int client_region_address(const struct kvd_region *region, uint64_t *address_p,
			  bool *gpu_p)
{
	*address_p = region->address;
	*gpu_p = region->kind == KVD_REGION_CUDA_IPC ||
		 region->kind == KVD_REGION_CUDA_VMM;
	if (region->kind == KVD_REGION_DMABUF || region->kind == KVD_REGION_FILE)
		return -1;
	return region->address ? 0 : 1;
}

uint64_t kvd_region_id(const struct kvd_region *region)
{
	return client_object_id(&region->object);
}
