/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A region's life: IMPORTING on a helper (map, populate, register with the transports),
 * READY, then CLOSING: look-ups do not find it, and after the last pin a helper
 * deregisters and unmaps it. None of that blocks the loop, and the object outlives its
 * session's end by session_drain_begin().
 *
 * Same memory, same id. Memory is the same if the object behind the descriptor (device,
 * inode), the range, and the address that the engine gave are equal; the number of the
 * descriptor and the name do not matter. Known memory is recognised before the import;
 * two concurrent imports of one memory are detected when the second is finished, and that
 * one is dropped again. For GPU memory the driver's handle, or the open file, and the
 * device are compared; several tensors of one allocation are several regions of one
 * import (gpu/import.h).
 *
 * The daemon may have more rights than its client. Objects that it opens on behalf of a
 * client are checked against the client's rights: a POSIX shm object by its owner and
 * mode, the address space of a process by the file that the client opened, or that we
 * open for the pid and uid that the kernel gave for the connection (memory/vm.h).
 */
#include "daemon/session/region.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <linux/kcmp.h>
#include <stdio.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "daemon/base/openat2.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/gate/gate.h"
#include "daemon/loop/offload.h"
#include "daemon/memory/memory.h"
#include "daemon/memory/vm.h"
#include "daemon/session/region_map.h"
#include "daemon/session/session.h"
#include "daemon/session/session_watch.h"
#include "gpu/import.h"

#define FILL_BYTES_MAX (UINT64_C(128) << 20) /* of one user */

static const struct sm_state region_states[] = {
	[REGION_IMPORTING] = {"importing", SM_TO(REGION_READY) | SM_TO(REGION_CLOSING)},
	[REGION_READY] = {"ready", SM_TO(REGION_CLOSING)},
	[REGION_CLOSING] = {"closing", 0},
};
const struct sm_table region_table = {
	.name = "region", .states = region_states, .count = ARRAY_LEN(region_states)};

/* a region and the private data of this file */
struct holding {
	struct region region;
	struct kvd *kvd;
	struct offload_job job; /* import, later close */
	struct charge charge, filled;
	uint64_t fill;		   /* most that is filled; later the actual number */
	int fd;			   /* of kinds with one, until it is imported */
	struct gpu_handle gpu;	   /* cuda_*; its fd is `fd` */
	struct memory_owner owner; /* vm; its pidfd is a duplicate */
	bool writable;
	dev_t dev;
	ino_t ino;
	uint64_t offset;
	void (*on_done)(void *arg, struct region *region, const struct err *err);
	void (*on_closed)(void *arg);
	void *arg;
};

static struct holding *holding_of(struct region *region)
{
	return container_of(region, struct holding, region);
}

const char *region_kind_name(enum region_kind kind)
{
	static const char *const names[REGION_KINDS] = {
		"memfd", "shm", "vm", "cuda_ipc", "cuda_vmm", "dmabuf", "file"};

	assert((unsigned int)kind < ARRAY_LEN(names));
	return names[kind];
}

/* ---- on helper threads ---- */

/* Undo import_work(), complete or partial. */
static void release_memory(struct region *region)
{
	for (unsigned int i = 0; i < TRANSPORTS_MAX; i++) {
		struct xp_reg *reg = mem_steal(region->regs[i]);

		if (reg)
			((struct xp_reg_base *)(void *)reg)
				->transport->ops->mem_dereg(reg);
	}
	memory_unref(region->memory);
	region->memory = NULL;
}

static int import_vm(struct holding *h)
{
	struct region *region = &h->region;
	int r = 0;

	if (h->fd < 0)
		r = vm_open(&h->owner, O_RDWR, &h->fd);
	if (r == 0)
		r = memory_import_vm(&h->owner, h->fd, region->address, region->length,
				     &region->memory);
	return err_pass(r);
}

static int import_memfd(struct holding *h)
{
	struct region *region = &h->region;
	int r = memory_import_sparse(h->fd, h->offset, region->length, h->writable,
				     &h->fill, &region->memory);

	if (r == 0)
		memory_offer(region->memory, h->kvd->gpu);
	return err_pass(r);
}

static int import_memory(struct holding *h)
{
	struct region *region = &h->region;

	switch (region->kind) {
	case REGION_MEMFD:
		return err_pass(import_memfd(h));
	case REGION_SHM:
		return err_pass(memory_import_sparse_shm(h->fd, h->offset, region->length,
							 h->writable, &h->fill,
							 &region->memory));
	case REGION_CUDA_IPC:
	case REGION_CUDA_VMM:
		h->gpu.fd = h->fd;
		return err_pass(memory_import_device(h->kvd->gpu, region->session->id,
						     &h->gpu, h->offset, region->length,
						     true, &region->memory));
	case REGION_DMABUF:
		return err_pass(memory_import_dmabuf(h->fd, h->offset, region->length,
						     &region->memory));
	case REGION_FILE:
		return err_pass(memory_import_file(h->fd, h->offset, region->length,
						   region->session->uid,
						   &region->memory));
	case REGION_VM:
	case REGION_KINDS:
		break;
	}
	return err_pass(import_vm(h));
}

/* A transport may not support a kind of memory; only no support at all is a fault. */
static int register_transports(struct holding *h)
{
	struct region *region = &h->region;
	unsigned int usable = 0, tried = 0;
	int r = 0;

	for (unsigned int i = 0; i < h->kvd->transport_count; i++) {
		struct transport *transport = h->kvd->transports[i];

		if (!transport)
			continue;
		tried++;
		r = transport->ops->mem_reg(transport, region->memory, &region->regs[i]);
		/* a transport without support fails each time; lack of memory does not */
		if (r < 0 && err_last()->code == ERR_NOMEM)
			return err_pass(r);
		if (r < 0)
			log_debug("region", transport->ops->name, err_last()->text,
				  "kind=%s bytes=%ju", region_kind_name(region->kind),
				  (uintmax_t)region->length);
		else
			usable++;
	}
	if (tried && !usable)
		return err_prefix(r, "no transport supports this %s memory",
				  region_kind_name(region->kind));
	return 0;
}

static void import_work(struct offload_job *job)
{
	struct holding *h = container_of(job, struct holding, job);

	job->result = import_memory(h);
	if (job->result == 0 && h->region.kind != REGION_FILE) /* no transport's */
		job->result = register_transports(h);
	if (job->result < 0) {
		err_take(&job->err); /* before the clean-up replaces it */
		release_memory(&h->region);
	}
}

static void region_close_work(struct offload_job *job)
{
	release_memory(&container_of(job, struct holding, job)->region);
}

/* ---- closing ---- */

static void holding_free(struct holding *h)
{
	mem_closep(&h->fd);
	mem_closep(&h->owner.pidfd);
	charge_drop(&h->charge);
	charge_drop(&h->filled);
	mem_free(h);
}

static void region_close_done(struct offload_job *job)
{
	struct holding *h = container_of(job, struct holding, job);
	struct session *session = h->region.session;

	idmap_remove(&session->regions, h->region.id);
	metrics_sub(&h->kvd->metrics, METRIC_REGIONS, 1);
	metrics_sub(&h->kvd->metrics, METRIC_AT(REGION_BYTES, h->region.kind, 0),
		    h->region.length);
	if (h->on_closed)
		h->on_closed(h->arg);
	holding_free(h);
	session_drain_end(session);
}

static void region_close_begin(struct holding *h)
{
	h->job = (struct offload_job){.work = region_close_work,
				      .done = region_close_done,
				      .principal = session_principal(h->region.session)};
	offload_submit(h->kvd->offload, &h->job);
}

/* Close a READY one, when it is unpinned: deregisters on a helper, unmaps, then
 * on_closed (may be NULL). Look-ups no longer find it. */
static void region_close(struct region *region, void (*on_closed)(void *arg), void *arg)
{
	struct holding *h = holding_of(region);

	assert(sm_state(&region->sm) == REGION_READY);
	sm_move(&region->sm, REGION_CLOSING);
	region_map_remove(region->session->region_map, region);
	session_drain_begin(region->session);
	region->session->files -= region->kind == REGION_FILE;
	h->on_closed = on_closed;
	h->arg = arg;
	region->session->regions_version++;
	region->pins++; /* our pin, while transfers release it */
	MODULES_EACH(h->kvd, m)
	{
		if (m->region_going)
			m->region_going(region);
	}
	region_unpin(region);
}

void region_pin(struct region *region)
{
	assert(sm_state(&region->sm) == REGION_READY);
	region->pins++;
}

void region_unpin(struct region *region)
{
	assert(region->pools <= region->pins);
	assert(region->pins > 0);
	if (--region->pins == 0 && sm_state(&region->sm) == REGION_CLOSING)
		region_close_begin(holding_of(region));
}

int region_unregister(struct region *region, void (*on_done)(void *arg), void *arg)
{
	assert(on_done && region->registered > 0);
	assert(sm_state(&region->sm) == REGION_READY);
	if (region->registered > 1) {
		region->registered--;
		on_done(arg);
		return 0;
	}
	if (region->pools)
		return err_raise(ERR_BUSY, "region %ju: %u pool%s it",
				 (uintmax_t)region->id, region->pools,
				 region->pools == 1 ? " uses" : "s use");
	region->registered = 0;
	region_close(region, on_done, arg);
	return 0;
}

void regions_close(struct session *session)
{
	struct idmap_cursor it;

	assert(session->ending);
	idmap_foreach(&session->regions, it) {
		struct region *region = it.value;

		if (sm_state(&region->sm) == REGION_READY)
			region_close(region, NULL, NULL);
	}
}

/* ---- look-ups ---- */

struct region *region_find(struct session *session, uint64_t id)
{
	struct region *region = idmap_get(&session->regions, id);

	if (region && sm_state(&region->sm) != REGION_READY)
		region = NULL;
	return session_found(region, "region", id);
}

/* Descriptors of drivers share one inode: only the open file distinguishes them. If a
 * kernel cannot compare those, the memory gets two ids, which is harmless. */
static bool same_file(const struct holding *known, const struct holding *asked)
{
	pid_t pid = getpid();
	const struct memory *memory = known->region.memory;
	int fd = known->region.kind == REGION_DMABUF ? memory->dmabuf_fd
		 : known->region.kind == REGION_FILE ? memory->mem_fd
						     : memory->gpu->handle.fd;

	return syscall(SYS_kcmp, pid, pid, KCMP_FILE, fd, asked->fd) == 0;
}

static bool same_object(const struct holding *known, const struct holding *asked)
{
	switch (asked->region.kind) {
	case REGION_CUDA_IPC:
		return strcmp(known->gpu.device, asked->gpu.device) == 0 &&
		       memcmp(&known->gpu.ipc, &asked->gpu.ipc, sizeof(asked->gpu.ipc)) ==
			       0;
	case REGION_CUDA_VMM:
		return strcmp(known->gpu.device, asked->gpu.device) == 0 &&
		       known->gpu.bytes == asked->gpu.bytes && same_file(known, asked);
	case REGION_DMABUF:
	case REGION_FILE: /* the mode of opening counts, too */
		return same_file(known, asked);
	default:
		return known->dev == asked->dev && known->ino == asked->ino;
	}
}

static struct region *find_same(const struct holding *h)
{
	struct idmap_cursor it;

	idmap_foreach(&h->region.session->regions, it) {
		struct region *other = it.value;
		const struct holding *with = holding_of(other);

		if (sm_state(&other->sm) == REGION_READY &&
		    !atomic_load(&other->memory->dead) && other->kind == h->region.kind &&
		    same_object(with, h) && with->offset == h->offset &&
		    other->length == h->region.length &&
		    other->address == h->region.address && with->writable == h->writable)
			return other;
	}
	return NULL;
}

/* ---- registering ---- */

static void import_fail(struct holding *h, const struct err *err)
{
	metrics_add(&h->kvd->metrics, METRIC_REGIONS_REFUSED, 1);
	h->on_done(h->arg, NULL, err);
}

/* The import is valid but not needed: close it like any other. */
static void import_drop(struct holding *h)
{
	sm_move(&h->region.sm, REGION_CLOSING);
	h->on_closed = NULL;
	session_drain_begin(h->region.session);
	region_close_begin(h);
}

/* Why the finished import cannot be used. */
static int import_check(struct holding *h)
{
	struct region *region = &h->region;

	if (region->session->ending)
		return err_raise(ERR_SESSION, "the session has ended");
	if (!session_watch_alive(region->session->watch))
		return err_raise(ERR_SESSION, "the engine's process has ended");
	if (region->address)
		return err_pass(region_map_put(region->session->region_map, region));
	return 0;
}

static void import_finish(struct holding *h)
{
	struct region *region = &h->region, *same = find_same(h);
	struct err err;

	metrics_add(&h->kvd->metrics, METRIC_REGIONS, 1);
	metrics_add(&h->kvd->metrics, METRIC_AT(REGION_BYTES, region->kind, 0),
		    region->length);
	if (same) {
		same->registered++;
		h->on_done(h->arg, same, NULL);
		import_drop(h);
	} else if (import_check(h) < 0) {
		err_take(&err);
		import_fail(h, &err);
		import_drop(h);
	} else {
		struct session *session = region->session;

		sm_move(&region->sm, REGION_READY);
		session->regions_version++;
		session->files += region->kind == REGION_FILE;
		region->registered = 1;
		log_debug("region", region->name, "imported",
			  "session=%ju region=%ju kind=%s bytes=%ju",
			  (uintmax_t)session->id, (uintmax_t)region->id,
			  region_kind_name(region->kind), (uintmax_t)region->length);
		h->on_done(h->arg, region, NULL);
		MODULES_EACH(h->kvd, m)
		{ /* after the answer: not urgent */
			if (m->region_coming)
				m->region_coming(session);
		}
	}
}

static void import_done(struct offload_job *job)
{
	struct holding *h = container_of(job, struct holding, job);
	struct session *session = h->region.session;

	mem_closep(&h->fd);
	if (job->result == 0 && !session->own)
		charge_less(&h->filled, h->filled.bytes - h->fill);
	if (job->result < 0) {
		idmap_remove(&session->regions, h->region.id);
		import_fail(h, &job->err);
		holding_free(h);
	} else {
		import_finish(h);
	}
	session_drain_end(session);
}

static int vm_take(struct holding *h, int fd)
{
	const struct session *session = h->region.session;

	h->fd = fd;
	h->writable = true;
	h->owner = (struct memory_owner){.warden = gates_warden(h->kvd->gates),
					 .uid = session->uid,
					 .pid = session->pid,
					 .pidfd = session_watch_pidfd(session->watch)};
	/* Without a descriptor of the client: only if the client itself may do it, and
	 * no other user may. */
	if (fd >= 0 || (session->pid > 0 && session->uid == geteuid()))
		return 0;
	if (session->pid <= 0)
		return err_raise(ERR_IMPORT,
				 "kind vm: the client is in a PID namespace hidden "
				 "from kvd, and passed no fd of its /proc/self/mem; "
				 "use memfd (kvd_memory_alloc, kvd_adopt)");
	return err_raise(
		ERR_PERM,
		"kind vm: kvd runs as uid %u, the client as %u, and it passed no fd of "
		"its /proc/self/mem; use memfd (kvd_memory_alloc, kvd_adopt)",
		geteuid(), session->uid);
}

/* As open(2) would decide for the client: the rights of the daemon do not count. */
static bool shm_permits(const struct session *session, const struct stat *st, mode_t want)
{
	mode_t have = st->st_uid == session->uid   ? st->st_mode >> 6
		      : st->st_gid == session->gid ? st->st_mode >> 3
						   : st->st_mode;

	return session->uid == 0 || (have & want) == want;
}

/* Accept only a regular file of that directory's file system. */
static int shm_reopen(int fd, const char *name, int *fd_p)
{
	*fd_p = openat2_reopen(fd, O_RDWR | O_NONBLOCK);
	if (*fd_p < 0 && errno == EACCES)
		*fd_p = openat2_reopen(fd, O_RDONLY | O_NONBLOCK);
	if (*fd_p < 0 && errno == EWOULDBLOCK)
		return err_raise(ERR_BUSY, "shm_name %s: a process holds a lease on it",
				 name);
	if (*fd_p < 0)
		return err_raise(errno == EACCES ? ERR_PERM : ERR_IMPORT,
				 "shm_name %s: %s", name, strerror(errno));
	return 0;
}

static int shm_take(struct holding *h, const char *name)
{
	const struct session *session = h->region.session;
	cleanup_close int fd = -1;
	size_t len = strlen(name);
	struct stat st;
	int r;

	if (len < 2 || len > 255 || name[0] != '/' || strchr(name + 1, '/'))
		return err_raise(ERR_INVAL,
				 "shm_name: must be '/' and 1 to 254 bytes without '/'");
	fd = openat2_path("/dev/shm", name + 1);
	if (fd < 0)
		return err_raise(ERR_IMPORT, "shm_name %s: %s", name, strerror(errno));
	if (fstat(fd, &st) < 0)
		return err_raise_errno(errno, "fstat of %s", name);
	if (!S_ISREG(st.st_mode))
		return err_raise(ERR_IMPORT, "%s is not a shared memory object", name);
	r = shm_reopen(fd, name, &h->fd);
	if (r < 0)
		return err_pass(r);
	if (!shm_permits(session, &st, 04))
		return err_raise(ERR_PERM, "%s: not readable for uid %u", name,
				 session->uid);
	h->writable = (fcntl(h->fd, F_GETFL) & O_ACCMODE) == O_RDWR &&
		      shm_permits(session, &st, 06);
	return 0;
}

static void memfd_take(struct holding *h, int fd)
{
	int seals = fcntl(fd, F_GET_SEALS);

	h->fd = fd;
	h->writable = (fcntl(fd, F_GETFL) & O_ACCMODE) == O_RDWR &&
		      (seals < 0 || !(seals & (F_SEAL_WRITE | F_SEAL_FUTURE_WRITE)));
}

static int gpu_take(struct holding *h, const struct region_args *args)
{
	if (!h->kvd->gpu)
		return err_raise(ERR_IMPORT, "kind %s: this daemon uses no GPU",
				 region_kind_name(args->kind));
	if (strlen(args->device) >= sizeof(h->gpu.device))
		return err_raise(ERR_INVAL, "device: over %zu bytes",
				 sizeof(h->gpu.device) - 1);
	memcpy(h->gpu.device, args->device, strlen(args->device) + 1);
	h->gpu.kind = args->kind == REGION_CUDA_IPC ? GPU_HANDLE_IPC : GPU_HANDLE_VMM;
	h->gpu.bytes = args->allocation;
	if (args->kind == REGION_CUDA_IPC)
		memcpy(&h->gpu.ipc, args->ipc, sizeof(h->gpu.ipc));
	else
		h->fd = args->fd;
	return 0;
}

/* Find the object that the arguments name. */
static int source_take(struct holding *h, const struct region_args *args)
{
	struct stat st;
	int r = 0;

	if (args->kind == REGION_CUDA_IPC || args->kind == REGION_CUDA_VMM)
		return err_pass(gpu_take(h, args));
	if (args->kind == REGION_DMABUF || args->kind == REGION_FILE) {
		h->fd = args->fd;
		h->writable = true; /* its open file tells whether it is */
		return 0;
	}
	if (args->kind == REGION_VM)
		return err_pass(vm_take(h, args->fd));
	if (args->shm_name)
		r = shm_take(h, args->shm_name);
	else
		memfd_take(h, args->fd);
	if (r < 0)
		return err_pass(r);
	if (fstat(h->fd, &st) < 0)
		return err_raise_errno(errno, "fstat of the memory's fd");
	h->dev = st.st_dev;
	h->ino = st.st_ino;
	return 0;
}

static int region_args_check(const struct session *session,
			     const struct region_args *args)
{
	uint32_t cap = session->kvd->config->session_regions_max;
	uint64_t end;

	if (session->ending)
		return err_raise(ERR_SESSION, "the session has ended");
	if (idmap_count(&session->regions) >= cap)
		return err_raise(ERR_LIMIT,
				 "%u regions in the session (limit: option "
				 "session_regions)",
				 cap);
	if (!args->length || args->length > INT64_MAX || args->offset > INT64_MAX)
		return err_raise(ERR_RANGE, "length %ju at offset %ju",
				 (uintmax_t)args->length, (uintmax_t)args->offset);
	if (__builtin_add_overflow(args->address, args->length, &end) || end > INT64_MAX)
		return err_raise(ERR_RANGE,
				 "address %#jx + length %ju is outside user space",
				 (uintmax_t)args->address, (uintmax_t)args->length);
	if ((args->kind == REGION_FILE) != (args->address >= REGION_FILE_ADDRESS))
		return err_raise(ERR_RANGE,
				 "address %#jx: addresses from 2^62 on are for files, "
				 "and only for files",
				 (uintmax_t)args->address);
	return 0;
}

/* The memory belongs to its engine; the tables that map it here do not: 8 bytes for
 * each page of 4 KiB. */
static uint64_t region_bytes(const struct holding *h)
{
	bool mapped = h->region.kind == REGION_MEMFD || h->region.kind == REGION_SHM;

	return sizeof(*h) + (mapped ? h->region.length / 512 : 0);
}

static int holding_new(struct session *session, const struct region_args *args,
		       struct holding **h_p)
{
	struct holding *h = mem_zalloc(sizeof(*h));

	if (!h)
		return err_pass(-ENOMEM);
	h->kvd = session->kvd;
	h->fd = -1;
	h->owner.pidfd = -1;
	h->offset = args->offset;
	h->region = (struct region){.session = session,
				    .kind = args->kind,
				    .address = args->address,
				    .length = args->length,
				    .impl = h};
	sm_init(&h->region.sm, &region_table, REGION_IMPORTING);
	snprintf(h->region.name, sizeof(h->region.name), "%s",
		 args->name ? args->name : "");
	*h_p = h;
	return 0;
}

/* Untouched small memory is filled at our expense; its amount per user is one account.
 * The unused part is returned. */
static void fill_reserve(struct holding *h)
{
	struct account *account = h->region.session->account;
	uint64_t held = account ? account->bytes[ACCOUNT_FILLED] : 0;
	uint64_t room = held < FILL_BYTES_MAX ? FILL_BYTES_MAX - held : 0;

	if (h->region.kind != REGION_MEMFD && h->region.kind != REGION_SHM)
		return;
	if (h->region.session->own) { /* its fill is at our own expense */
		h->fill = h->region.length;
		return;
	}
	h->fill = h->region.length < room ? h->region.length : room;
	if (charge_take(&h->filled, account, ACCOUNT_FILLED, h->fill) < 0) {
		err_clear();
		h->fill = 0;
	}
}

/* The file, as received and as mapped or held; of other memory also its process or its
 * adapters' handle. */
static unsigned int region_fds(const struct holding *h)
{
	return h->region.kind == REGION_MEMFD || h->region.kind == REGION_SHM ||
			       h->region.kind == REGION_FILE
		       ? 2
		       : 4;
}

int region_register(struct session *session, const struct region_args *args,
		    void (*on_done)(void *arg, struct region *region,
				    const struct err *err),
		    void *arg)
{
	struct holding *h = NULL;
	struct region *same;
	int r = region_args_check(session, args);

	assert(on_done && args->kind < REGION_KINDS);
	if (r == 0)
		r = holding_new(session, args, &h);
	if (r < 0)
		return err_pass(r);
	h->on_done = on_done;
	h->arg = arg;
	r = source_take(h, args);
	same = r < 0 ? NULL : find_same(h);
	if (same) {
		holding_free(h);
		same->registered++;
		on_done(arg, same, NULL);
		return 0;
	}
	h->region.id = ++session->next_id;
	if (r == 0 && session->own)
		charge_force(&h->charge, session->account, ACCOUNT_REGIONS,
			     region_bytes(h));
	else if (r == 0)
		r = charge_take(&h->charge, session->account, ACCOUNT_REGIONS,
				region_bytes(h));
	if (r == 0 && session->admin)
		charge_fds_force(&h->charge, region_fds(h));
	else if (r == 0)
		r = charge_fds(&h->charge, region_fds(h));
	if (r == 0)
		fill_reserve(h);
	if (r == 0)
		r = idmap_put(&session->regions, h->region.id, &h->region);
	if (r < 0) {
		if (h->fd == args->fd) /* the caller keeps it */
			h->fd = -1;
		holding_free(h);
		return err_pass(r);
	}
	session_announce(session);
	session_drain_begin(session);
	h->job = (struct offload_job){.work = import_work,
				      .done = import_done,
				      .principal = session_principal(session)};
	offload_submit(h->kvd->offload, &h->job);
	return 0;
}
