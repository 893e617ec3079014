/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd.h: libkvd, the client library of the kvd daemon for inference engines.
 *
 * An engine opens one client, registers its cache memory and a pool once, then opens a
 * room for each request, names the pages to move, and reads the room's state from shared
 * memory. Most functions that involve the daemon have several forms, selected by the
 * argument `call`, which precedes the outputs:
 *
 *   NULL or on_done NULL   the call blocks until the reply, at most timeout_ms
 *   on_done set            the call queues the request and returns; on_done runs
 *                          later, inside kvd_poll() or any blocking call
 *   post set               rooms: written to shared memory, without a wait or a
 *                          reply; a refused request fails the room
 *
 * Results. Functions that return int give 0 or a negative kvd code (-KVD_E_BUSY …);
 * kvd_last_error() gives the text. Functions that return a state give 0 … 4, or a
 * negative code.
 *
 * Ownership. Strings, arrays and structs that are passed in are copied before the call
 * returns. Handles (region, pool, room, dlist, xfer) belong to their client. Each is
 * freed by its own closing function when that succeeds, and the remaining ones by
 * kvd_close(). A blocking call that fails sets its handle to NULL; if the daemon
 * completes the request after the caller's timeout, libkvd undoes it. (kvd_room_open()
 * keeps the handle with -KVD_E_NOREPLY and -KVD_E_LOST, because bytes may be moving: the
 * room's state shows when they no longer can.) An asynchronous call sets its handle at
 * once. If on_done reports an error, the handle is unusable but remains until its closing
 * function frees it.
 *
 * Structs passed in: zero them completely first; zero means "the default".
 *
 * Units. Sizes and offsets in bytes, times in the unit of the name, tokens and pages
 * counted from 0, ranges half-open.
 *
 * Transfers, their lists and notifications never block and take no `call`: they are
 * written to shared memory (kvd_xfer_post() and related functions, below). Their results
 * are read from shared memory too, or waited for (kvd_xfer_wait(), kvd_dlist_wait()).
 *
 * Threads. A client and its handles may be used by one thread at a time (one client per
 * thread, or a lock of the caller). Exceptions are kvd_room_state(), kvd_room_states(),
 * kvd_room_read(), kvd_xfer_state(), kvd_xfer_read(), kvd_move_state() and
 * kvd_move_read(): any thread may call them, at any time between creation and closing of
 * the handle, without a lock.
 *
 * fork. A client belongs to the process that opened it. In a child every call returns
 * -KVD_E_FORKED, except the functions listed above and kvd_close(), which frees the
 * child's copies without contacting the daemon.
 *
 * Signals, stdio, environment: libkvd raises no SIGPIPE, prints nothing, and reads only
 * KVD_SOCKET, KVD_NAME and KVD_RUN_DIR.
 */
#ifndef KVD_H
#define KVD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "kvd_status.h" /* enum kvd_state, KVD_FLAG_… */

#ifdef __cplusplus
extern "C" {
#endif

struct kvd_client;
struct kvd_region;
struct kvd_pool;
struct kvd_room;
struct kvd_dlist;
struct kvd_xfer;
struct kvd_layout;

/* ---- errors ------------------------------------------------------------- */

/* 1 … 37 are codes of the daemon (stable; names on the wire), 512 … are codes of
 * libkvd. */
enum kvd_code {
	KVD_OK = 0,
	KVD_E_INVAL = 1,      /* a field has a value outside its limits */
	KVD_E_PROTO = 2,      /* a message breaks the protocol */
	KVD_E_TOOBIG = 3,     /* a line, list or frame exceeds its limit */
	KVD_E_NOCMD = 4,      /* no such command */
	KVD_E_PERM = 5,	      /* permission denied */
	KVD_E_NOTFOUND = 6,   /* no such object in this session */
	KVD_E_EXIST = 7,      /* already exists with different contents */
	KVD_E_BUSY = 8,	      /* in use now */
	KVD_E_LIMIT = 9,      /* a configured limit is reached */
	KVD_E_NOMEM = 10,     /* out of memory, in this process or in the daemon */
	KVD_E_STATE = 11,     /* not allowed in the current state */
	KVD_E_LAYOUT = 12,    /* the layouts of the two sides do not match */
	KVD_E_COVER = 13,     /* no source holds a requested part */
	KVD_E_RANGE = 14,     /* out of range of a pool, region or list */
	KVD_E_DUP = 15,	      /* the same bytes were sent twice */
	KVD_E_SHORT = 16,     /* bytes are missing after the last chunk */
	KVD_E_ABORTED = 17,   /* aborted by an engine */
	KVD_E_PEER = 18,      /* the connection to the remote daemon was lost */
	KVD_E_SESSION = 19,   /* the engine of the object has exited */
	KVD_E_TIMEOUT = 20,   /* a timeout of the room expired */
	KVD_E_STALL = 21,     /* no progress within the stall timeout */
	KVD_E_LEASE = 22,     /* the lease of the offer has expired */
	KVD_E_TRANSPORT = 23, /* the transport failed */
	KVD_E_REQUIRE = 24,   /* no allowed transport */
	KVD_E_IMPORT = 25,    /* this kind of memory is not supported */
	KVD_E_FAULT = 26,     /* the memory of a region is no longer mapped */
	KVD_E_FENCE = 27,     /* could not verify in time that I/O has stopped */
	KVD_E_DRAIN = 28,     /* the daemon is draining */
	KVD_E_RESTART = 29,   /* the remote daemon has restarted */
	KVD_E_VERSION = 30,   /* no common protocol version */
	KVD_E_AUTH = 31,      /* not authenticated */
	KVD_E_CANCELED = 32,  /* canceled by its owner */
	KVD_E_PLAN = 33,      /* the plans of the two sides differ */
	KVD_E_REVOKED = 34,   /* the memory is no longer exported */
	KVD_E_CONFIG = 35,    /* the configuration is not usable */
	KVD_E_IO = 36,	      /* the operating system returned an error */
	KVD_E_INTERNAL = 37,  /* internal error */

	KVD_E_GONE = 512,     /* the status slot belongs to another object */
	KVD_E_NODAEMON = 513, /* no daemon answers on the socket */
	KVD_E_LOST = 514,     /* no session: libkvd reconnects, see kvd_reconnect() */
	KVD_E_NOREPLY = 515,  /* no answer within timeout_ms */
	KVD_E_FULL = 516,     /* libkvd's own queue is full: call kvd_poll() first */
	KVD_E_FORKED = 517,   /* this client belongs to the parent process */
	KVD_E_DEAD = 518,     /* the local daemon's process has exited (rooms, xfers) */
};

struct kvd_error {
	int code;	   /* enum kvd_code, positive */
	bool retryable;	   /* the same call may succeed later */
	char scope[16];	   /* scope: op room peer session device daemon */
	char message[320]; /* one line, names the field and the limit */
};

/* The error of the client's last failed call; never NULL. Valid until its next call.
 * `client` NULL: the error of this thread's last failed kvd_open(),
 * kvd_memory_alloc(), kvd_adopt() or kvd_layout_text(). */
const struct kvd_error *kvd_last_error(const struct kvd_client *client);
/* "EINVAL"…, "EGONE"…; "EUNKNOWN" for an unknown code. The sign is ignored. */
const char *kvd_code_name(int code);
/* "failed" "bootstrapping" "waiting_for_input" "transferring" "success". */
const char *kvd_state_name(int state);
const char *kvd_version(void); /* "0.1.0" */

/* ---- client ------------------------------------------------------------- */

struct kvd_options {
	const char *socket; /* path; NULL: kvd_socket_find() */
	const char *name; /* instance name, when socket is NULL: <run dir>/<name>.sock */
	const char *client;	  /* name of this engine; NULL: "libkvd" */
	const char *role;	  /* "prefill", "decode" or NULL */
	int timeout_ms;		  /* default of every call; 0: 10 000 */
	unsigned int max_pending; /* unanswered requests; 0: 4096 */
	size_t max_queued_bytes;  /* unsent bytes; 0: 8 MiB */
	bool manual_reconnect;	  /* do not reconnect until kvd_reconnect() */
};

/* Information from the reply to `hello`. */
struct kvd_daemon_info {
	char daemon[64];    /* "kvd 0.1.0" */
	char name[64];	    /* name of the instance */
	char instance[33];  /* hex; changes when the daemon restarts */
	char endpoint[128]; /* endpoint for other daemons: "tcp://10.0.0.2:7400" */
	int pid;	    /* in this PID namespace, from the kernel; 0: not visible */
	uint64_t session;
	uint64_t epoch; /* identifies this session to others (kvd_peer_attach) */
	uint32_t slots; /* of the status page */
};

/*
 * The control socket: <run dir>/<name>.sock when name is not NULL; else $KVD_SOCKET; else
 * <run dir>/$KVD_NAME.sock; else the only *.sock in the run dir ($KVD_RUN_DIR, or
 * /run/kvd). -KVD_E_NODAEMON: none, or several (*why gives the reason), -KVD_E_TOOBIG:
 * the path is too long.
 */
int kvd_socket_find(const char *name, char *path, size_t path_bytes,
		    struct kvd_error *why);

/* Connect and open a session; blocks at most options->timeout_ms. `options` may be
 * NULL. */
int kvd_open(const struct kvd_options *options, struct kvd_client **client_p);
/*
 * End the session: the daemon aborts its rooms and transfers and drops the regions.
 * Pending requests are discarded, and their on_done is not called. NULL is allowed.
 * -KVD_E_STATE inside a callback, without effect.
 */
int kvd_close(struct kvd_client *client);
/*
 * When the connection ends (the daemon restarted, or closed it), libkvd opens a new
 * session automatically. It connects, with pauses of 10 ms … 1 s between attempts, and
 * registers all regions and pools again under their old handles. kvd_poll() performs the
 * steps that are due and never waits for the daemon; a blocking call connects at once if
 * a daemon listens and waits, within its own timeout, for the registrations. While there
 * is no session every call that needs one returns -KVD_E_LOST, retryable, and performs
 * the step that is due, so an engine that only repeats its call reconnects, too.
 * -KVD_E_STATE is for calls that can never succeed.
 *
 * Attachments and dlists are restored after that. Calls that name one wait for it, or
 * return -KVD_E_BUSY if they never wait, and -KVD_E_STATE when it cannot be restored (the
 * attached session has ended, too).
 *
 * Rooms and xfers of the old session are not resumed. They end as the old session ends
 * them (KVD_E_DEAD once its daemon's process has exited) and must be closed. The session
 * has a new key (kvd_session_key).
 *
 * kvd_lost(): there is no session now. kvd_reconnect(): open a new one now, blocking, in
 * any case; the only method with options->manual_reconnect.
 */
int kvd_reconnect(struct kvd_client *client, int timeout_ms);
bool kvd_lost(const struct kvd_client *client);
const struct kvd_daemon_info *kvd_daemon(const struct kvd_client *client);

/* ---- calls, answers, event loops ---------------------------------------- */

struct kvd_reply {
	const char *json;	       /* line of the reply; NULL without a reply */
	const struct kvd_error *error; /* NULL when result is 0 */
};

struct kvd_call {
	int timeout_ms; /* 0: the client's default, negative: unlimited */
	/* Called exactly once for each queued request, except by kvd_close(). `reply` is
	 * valid during the call. It may start asynchronous calls; blocking ones return
	 * -KVD_E_STATE. */
	void (*on_done)(void *arg, int result, const struct kvd_reply *reply);
	void *arg;
	/* Calls on rooms only: written to shared memory, without a reply; the other
	 * members are ignored. See kvd_room_open(). */
	bool post;
};

/* The socket for select, poll, epoll; -1 while there is none. It changes with every
 * attempt to reconnect: get it again after every call. Wait for kvd_events() (POLLIN,
 * possibly POLLOUT; get it again after every call) or kvd_timeout_ms() (-1: no
 * deadline), then call kvd_poll(client, 0). */
int kvd_fd(const struct kvd_client *client);
short kvd_events(const struct kvd_client *client);
int kvd_timeout_ms(const struct kvd_client *client);
/* Send, receive, run callbacks; wait at most timeout_ms for work. Returns the number
 * of requests that ended, or -KVD_E_LOST while there is no session (all pending
 * requests have ended then; call it again to reconnect). */
int kvd_poll(struct kvd_client *client, int timeout_ms);
unsigned int kvd_pending(const struct kvd_client *client);

/*
 * Any command of the control protocol: `args` is a JSON object without "cmd" and "id"
 * (NULL: {}). Never blocks: call->on_done is required.
 */
int kvd_submit(struct kvd_client *client, const char *cmd, const char *args,
	       const struct kvd_call *call);
/* The same, blocking; *reply_p is the line of the reply, also of an error reply (NULL
 * when none was received). Free it with kvd_string_free(). */
int kvd_command(struct kvd_client *client, const char *cmd, const char *args,
		int timeout_ms, char **reply_p);
void kvd_string_free(char *string);

/* ---- memory and regions -------------------------------------------------- */

/*
 * Cache memory in the best form for kvd: a memfd sealed against shrinking and growing,
 * mapped on a 2 MiB boundary, populated here (so the pages are charged to this process)
 * and collapsed into huge pages where the kernel can.
 */
struct kvd_memory {
	int fd;
	void *address;
	size_t bytes;	   /* as requested, rounded up to 2 MiB */
	size_t huge_bytes; /* of these, in huge pages */
};

/* `name` appears in /proc/PID/maps. -KVD_E_NOMEM, -KVD_E_IO. Needs no client. */
int kvd_memory_alloc(size_t bytes, const char *name, struct kvd_memory *memory_p);
/* Unmap and close; unregister its region first. */
void kvd_memory_free(struct kvd_memory *memory);

/*
 * Adopt: move memory that this process already has behind a memfd, in place, so that the
 * daemon can map it and move data with one copy. Addresses and contents stay. Its region
 * is registered by address as KVD_REGION_VM (libkvd detects that it was adopted, and
 * passes the memfd) or by fd and offset. Other threads may continue to read and write:
 * each slice is write-protected (userfaultfd), copied and replaced, and a store in the
 * meantime waits, so none is lost. If the process may not use userfaultfd the result is
 * -KVD_E_PERM, unless `quiet` promises that no thread writes until the call returns. With
 * unprivileged userfaultfd only stores wait; a system call that writes to a slice at that
 * moment (read(), recv()) fails with EFAULT.
 *
 * Accepted: a chunk of 32 MiB or more that glibc's malloc mapped for one allocation, by
 * the pointer that it returned; or, with `vouched`, any private anonymous memory whose
 * pages all belong to the caller. Refused by name (-KVD_E_IMPORT): shared, file-backed,
 * heap, stack, huge TLB, and memory that is registered with CUDA (adopt first, then
 * cudaHostRegister).
 *
 * Permanent effects (memory is never moved back): MADV_DONTNEED does not zero it, and
 * realloc() must not be called on it; free() is allowed. A child of fork() has a private
 * view of it: its writes are its own, and it sees its parent's writes to a page until it
 * has written to that page. kvd cannot detect physical pages that are held elsewhere
 * (RDMA registrations of another library, io_uring buffers, vfio, O_DIRECT in flight);
 * these stay the old ones, so adopt before such registrations. Transfers by kvd or
 * process_vm_writev() into the memory must not be in progress.
 *
 * There is one registry per process: memory adopted twice, or by another copy of libkvd,
 * is moved once. It is forgotten, and its memfd closed, some time after it was unmapped.
 * At most 4096 ranges.
 */
struct kvd_adopt_args {
	void *address;
	size_t bytes;
	bool quiet;   /* no thread writes to it until the call returns */
	bool vouched; /* all of its pages belong to the caller */
};

struct kvd_adopted {
	int fd;		 /* the registry's: valid while the memory is mapped */
	uint64_t offset; /* of `address` in it */
	void *address;	 /* as requested */
	size_t bytes;
	size_t huge_bytes; /* of its whole range in huge pages */
	bool moved;	   /* by this call; false: it had been adopted */
	bool waited;	   /* concurrent stores were made to wait (userfaultfd) */
	uint64_t id;	   /* of the range */
};

/* Any thread; needs no client. After a failure in the middle the memory is intact and
 * usable, and the same call continues from there: -KVD_E_NOMEM, _PERM, _IMPORT,
 * _INVAL, _LIMIT, _IO. */
int kvd_adopt(const struct kvd_adopt_args *args, struct kvd_adopted *adopted_p);

enum kvd_region_kind {
	KVD_REGION_MEMFD = 0, /* fd; sealed by the daemon if it is not sealed */
	/* POSIX shared memory, by name or fd; or a memfd that cannot be sealed. Not
	 * for RDMA adapters, because its owner can truncate it */
	KVD_REGION_SHM = 1,
	/* any memory of this process; staged, slower. Adopted memory is passed as
	 * memfd */
	KVD_REGION_VM = 2,
	/* GPU memory of cuMemAlloc or cudaMalloc: the IPC handle of the allocation */
	KVD_REGION_CUDA_IPC = 3,
	KVD_REGION_CUDA_VMM = 4, /* GPU memory of cuMemCreate: an exported fd */
	KVD_REGION_DMABUF = 5,	 /* a dma-buf fd: for RDMA adapters only */
	/* bytes of a file, for this client's own transfers by address (dlists) */
	KVD_REGION_FILE = 6,
};

#define KVD_FILE_ADDRESS (UINT64_C(1) << 62) /* up to 2^63 */

struct kvd_region_args {
	enum kvd_region_kind kind;
	/* memfd, cuda_vmm, dmabuf, file, shm without shm_name: duplicated for
	 * kvd_reconnect() */
	int fd;
	const char *shm_name; /* shm: "/name"; NULL: by its fd */
	uint64_t offset;      /* byte offset in the object, allocation or file */
	uint64_t bytes;
	/* this process's address of byte 0: required for vm and for dlists. file:
	 * required, any number from KVD_FILE_ADDRESS on, by which lists address its
	 * bytes */
	const void *address;
	const char *name; /* shown to operators; may be NULL */
	/* cuda_ipc, cuda_vmm: the GPU, by UUID ("GPU-…") or PCI id. Device numbers are
	 * not accepted, because they differ between processes */
	const char *device;
	/* cuda_ipc: the 64 bytes of cuIpcGetMemHandle. The handle is that of the whole
	 * allocation, whatever pointer it was requested for: `offset` is the pointer
	 * minus the base of cuMemGetAddressRange (PyTorch returns sub-ranges) */
	const void *ipc_handle;
	uint64_t allocation; /* cuda_vmm: bytes passed to cuMemCreate */
};

/*
 * Register memory with the daemon; the reply follows when it is imported and populated.
 * Registering the same memory twice gives two handles of one daemon region. A vm region
 * lets the daemon read and write all memory of this process, by a descriptor of
 * /proc/self/mem that is passed with the registration; prctl PR_SET_PTRACER, which names
 * the last daemon only, lets it open that again for other daemons of its user.
 * -KVD_E_PERM, -KVD_E_IMPORT: not possible here; use memfd. A file is a regular file of a
 * local file system or a block device, opened by the caller with the access that its
 * transfers need; the daemon opens none. Reading past its end fails the transfer, writing
 * past it extends it. Durability after a power loss is the caller's responsibility
 * (fsync()).
 */
int kvd_region_register(struct kvd_client *client, const struct kvd_region_args *args,
			const struct kvd_call *call, struct kvd_region **region_p);
/* The whole `memory` as one region. */
int kvd_region_memory(struct kvd_client *client, const struct kvd_memory *memory,
		      const struct kvd_call *call, struct kvd_region **region_p);
/* -KVD_E_BUSY while a pool uses it. After success the memory is no longer accessed.
 * Frees the handle on success. */
int kvd_region_unregister(struct kvd_region *region, const struct kvd_call *call);
uint64_t kvd_region_id(const struct kvd_region *region); /* 0: not registered now */

/* ---- layouts and pools --------------------------------------------------- */

/* The affine map of one field (docs/internals/layouts.md): the offset of byte 0 of
 * (page, token, unit): offset + page * page_stride + token * token_stride + (unit -
 * first_unit) * unit_stride. */
struct kvd_field {
	const char *name; /* "k", "v", … */
	uint32_t buffer;  /* of kvd_layout_buffer() */
	uint64_t offset, page_stride, token_stride, unit_stride, unit_bytes;
	uint32_t first_unit, units, total_units;
	/* Data type, up to 15 bytes: "bf16"; NULL: unspecified. Rooms between pools
	 * with different data types fail. */
	const char *format;
};

enum kvd_head_order {
	KVD_NHD = 0, /* in a page: token, head, dim */
	KVD_HND = 1, /* in a page: head, token, dim */
};

/*
 * Build the layout text of a pool. A builder keeps its first error (out of memory, a bad
 * index), which kvd_layout_text() reports; the preceding calls need no check. Not bound
 * to a client.
 */
struct kvd_layout *kvd_layout_new(uint32_t rank); /* NULL: out of memory */
void kvd_layout_free(struct kvd_layout *layout);
uint32_t kvd_layout_buffer(struct kvd_layout *layout, uint64_t bytes);
uint32_t kvd_layout_view(struct kvd_layout *layout, const char *name,
			 uint32_t page_tokens, uint32_t pages);
/* The view holds token t of a request only when (t / run) % size == rank (context
 * parallelism); its pages hold only these. */
void kvd_layout_shard(struct kvd_layout *layout, uint32_t view, uint32_t size,
		      uint32_t rank, uint32_t run);
void kvd_layout_field(struct kvd_layout *layout, uint32_t view, uint32_t layer,
		      const struct kvd_field *field);
/*
 * A dense attention field: contiguous pages from field->offset on. Reads name, buffer,
 * offset, unit_bytes (one head of one token), first_unit, units, total_units; page_stride
 * 0: units * unit_bytes * page_tokens; the other strides follow from the order.
 */
void kvd_layout_heads(struct kvd_layout *layout, uint32_t view, uint32_t layer,
		      enum kvd_head_order order, const struct kvd_field *field);
/* The layout owns *text_p. */
int kvd_layout_text(struct kvd_layout *layout, const char **text_p);

struct kvd_pool_args {
	const char *name;   /* pools of equal names exchange data; NULL: "kv" */
	const char *layout; /* JSON text (see struct kvd_field); kvd_layout_text() */
	struct kvd_region *const *regions; /* one per buffer of the layout */
	const uint64_t *offsets;	   /* of each buffer in its region; NULL: all 0 */
	size_t region_count;
};

int kvd_pool_register(struct kvd_client *client, const struct kvd_pool_args *args,
		      const struct kvd_call *call, struct kvd_pool **pool_p);
/* -KVD_E_BUSY while rooms use it. Frees the handle on success. */
int kvd_pool_unregister(struct kvd_pool *pool, const struct kvd_call *call);
uint64_t kvd_pool_id(const struct kvd_pool *pool); /* 0: not registered now */

/* ---- rooms --------------------------------------------------------------- */

enum kvd_role {
	KVD_SEND = 0,  /* push, sending (prefill) side */
	KVD_RECV = 1,  /* push, receiving (decode) side */
	KVD_OFFER = 2, /* pull, prefill side: pages offered for reading */
	KVD_PULL = 3,  /* pull, reading (decode) side */
};

/* Pages of one view, and the range in use. */
struct kvd_view {
	const char *name; /* NULL: "kv" */
	const uint32_t *pages;
	size_t page_count;
	uint64_t first_token;		 /* first token of the request in pages[0] */
	uint64_t token_begin, token_end; /* both 0: all tokens of the pages */
	uint32_t layer_begin, layer_end; /* both 0: all layers */
	/* of kvd_fetch() only: a gather of these tokens of the request, ascending */
	const uint32_t *select; /* NULL: all tokens of the range */
	size_t select_count;
};

/*
 * Start condition: a point that the engine's stream must pass before a chunk's pages are
 * read, or before data is written to pages that were just freed: when
 * *(uint64_t *)(region + offset) >= value. The region must be sealed memory (memfd).
 * examples/timeline.h has a word that a CUDA stream increments.
 */
struct kvd_wait {
	struct kvd_region *region; /* region of the word; NULL: no wait */
	uint64_t offset;
	uint64_t value;
};

/* Exactly one pool of the source's daemon must match, otherwise the room fails
 * (KVD_E_INVAL). If that daemon serves several engines, `session`, or group and
 * worker, select one; a ticket does not, it only restricts access. */
struct kvd_source {
	const char *endpoint; /* endpoint of the source's daemon; NULL: the local
			       * daemon, or `group` */
	const char *pool;     /* name of its pool; NULL: any */
	uint64_t session;     /* kvd_daemon()->epoch of the engine's client; 0: any */
	uint64_t room;	      /* number of the room there, if another_room is set */
	bool another_room;
	bool has_rank; /* rank of its pool, needed only if pools of one name have
			* several ranks */
	uint32_t rank;
	const struct kvd_view
		*views; /* pull: pages of the source; none: the whole offer */
	size_t view_count;
	/* Instead of an endpoint: the member of a group at these ranks, from the
	 * directory of the cluster (docs/cluster.md). The room waits until such a
	 * member exists. */
	const char *group;
	const char *worker; /* NULL: the group's only one */
	uint32_t tp_rank, pp_rank, dp_rank, cp_rank;
};

struct kvd_room_args {
	uint64_t room; /* chosen by the router; unique per role in this client */
	enum kvd_role role;
	struct kvd_pool *pool;
	const struct kvd_source *sources; /* recv, pull */
	size_t source_count;
	/* recv: receivers per source, 0: 1; offer: number of pullers, 0: 1, unless the
	 * pullers send it (receivers_from_pullers); pull: number of pullers, which is
	 * sent to the offers and must match, 0: not sent */
	uint32_t receivers;
	bool receivers_from_pullers;
	/* offer, pull: the local pages. A pull without pages queries the offers and
	 * extends their leases. It is KVD_WAITING_FOR_INPUT when all are known, and
	 * reads when pages are bound (binding no pages releases the offers). */
	const struct kvd_view *views;
	size_t view_count;
	bool has_aux;	      /* offer, pull */
	uint32_t aux;	      /* slot of the view "aux" */
	struct kvd_wait wait; /* offer: condition before reading; pull: condition
			       * before writing */
	uint32_t lease_ms;    /* offer; 0: the daemon's default */
	uint32_t bootstrap_ms, waiting_ms, stall_ms; /* 0: the daemon's defaults */
	/*
	 * Name and span of the engine's request, or NULL: shown by kvd-ctl and in the
	 * log; for a recv or pull also on the remote side, if its room has none.
	 * request_id: 1 to 128 bytes of visible ASCII without " and \. traceparent:
	 * 00-TRACE-PARENT-FLAGS of W3C Trace Context, lower-case hex, 55 characters.
	 * Otherwise -KVD_E_INVAL or -KVD_E_RANGE.
	 */
	const char *request_id, *traceparent;
	/*
	 * Access control; with neither, daemons of the local daemon's user are admitted
	 * (without keys: all). ticket: 32 random hex digits, chosen together with the
	 * number and passed to both sides; NULL: none. A source refuses requests for its
	 * room with another ticket or none (-KVD_E_AUTH there). peers: names of the
	 * daemon's curve_allow_file; no other daemon may be a source or a receiver.
	 */
	const char *ticket;
	const char *const *peers;
	size_t peer_count;
};

/* Of a chunk that is sent, or bound: then seq and last are not used. */
struct kvd_room_pages {
	uint64_t seq; /* 0, 1, …: a chunk with the same seq is accepted once */
	const struct kvd_view *views;
	size_t view_count;
	bool last;
	bool has_aux;
	uint32_t aux; /* slot of the view "aux" */
	struct kvd_wait wait;
};

struct kvd_room_status {
	int state;	    /* enum kvd_state */
	unsigned int flags; /* KVD_FLAG_… */
	int error;	    /* enum kvd_code; 0 unless failed or aborting */
	bool retryable;
	uint64_t bytes;	     /* bytes received or sent so far */
	uint64_t total;	     /* bytes expected; 0: not known yet; for a sender: known
			      * at its end */
	uint64_t changed_ns; /* CLOCK_MONOTONIC of the last state change; 0: unknown */
	/* For rooms; larger values are limited to the type's maximum. */
	/* send: the first token that a receiver wants of the pool's first view, or of
	 * any view if none wants that one (the receiver already has the tokens before
	 * it); -1: no receiver has bound */
	int64_t first_token;
	uint16_t done;	   /* sender: chunks whose pages the daemon has finished
			    * reading */
	uint32_t rows;	   /* of the plans computed on this side */
	uint32_t moved_us; /* time from the first chunk to the last byte so far */
};

/*
 * Binds and chunks may follow before the reply; they fail if the opening fails. Every
 * call on a failed room returns the room's own error, "room 42 failed: …".
 *
 * Posted (call->post): open, bind, send, extend, abort and close never wait for a reply
 * or the daemon, and make no system call while the daemon is awake, so a scheduler's loop
 * can use them. They take the same arguments and have the same effect as calls with a
 * reply; only the report of a refusal differs. A refused call with a reply changes
 * nothing, and returns the error. A posted one returns 0, and if the daemon refuses it (a
 * page outside its view, a number that is already open) the room fails: its state is
 * KVD_FAILED, and kvd_room_why() has the text. Use calls with a reply to see refusals.
 *
 * A room whose opening was posted takes only posted binds, chunks and extensions
 * (-KVD_E_STATE). A room opened by a call with a reply takes both, in the order of the
 * calls; posted ones only after the reply to its opening (-KVD_E_BUSY before).
 *
 * A posted kvd_room_close() is allowed in any state: a room that has not ended is aborted
 * and is removed, without a handle, after its I/O has stopped; its pages may change until
 * then. To stop its I/O first: abort, wait for the state, then close. The number may be
 * opened again at once.
 *
 * Pages are sent in binary and read outside the daemon's loop: 131 072 scattered pages
 * take 512 KiB of the 64 MiB shared by all entries in progress. -KVD_E_FULL: no space
 * now, call kvd_poll() and repeat; -KVD_E_TOOBIG: it can never fit.
 *
 * The first posted call of a session creates its shared memory, one round trip:
 * kvd_xfer_prepare() does so earlier. -KVD_E_NOCMD, -KVD_E_REQUIRE: the daemon does not
 * support it; use calls with a reply.
 */
int kvd_room_open(struct kvd_client *client, const struct kvd_room_args *args,
		  const struct kvd_call *call, struct kvd_room **room_p);
/* recv, and a pull that was opened without pages: set the destination pages. */
int kvd_room_bind(struct kvd_room *room, const struct kvd_room_pages *args,
		  const struct kvd_call *call);
/* send: one chunk. */
int kvd_room_send(struct kvd_room *room, const struct kvd_room_pages *args,
		  const struct kvd_call *call);
/* offer: set the lease, also used for each extension by a puller. */
int kvd_room_extend(struct kvd_room *room, uint32_t lease_ms,
		    const struct kvd_call *call);
/* Any state. The state becomes failed when I/O of the room has stopped. */
int kvd_room_abort(struct kvd_room *room, const char *reason,
		   const struct kvd_call *call);
/* Terminal rooms only (else -KVD_E_STATE), or any if posted. Frees the handle on
 * success. */
int kvd_room_close(struct kvd_room *room, const struct kvd_call *call);
/* The daemon's complete record, JSON; free it with kvd_string_free(). */
int kvd_room_show(struct kvd_room *room, int timeout_ms, char **json_p);

/*
 * The state of the room: one atomic load from shared memory and, while the room is not
 * terminal, a check of the daemon's heartbeat (vDSO clock). No system call while the
 * daemon lives. Terminal (KVD_FAILED, KVD_SUCCESS) means quiesced: kvd and its peers no
 * longer access the room's memory on this side.
 *
 * If the heartbeat is old, a room that is not terminal shows KVD_TRANSFERRING with
 * KVD_FLAG_ABORTING, and KVD_E_NOREPLY unless it has another error: the local daemon does
 * not respond; keep its pages. When the daemon's process has exited it is KVD_FAILED,
 * KVD_E_DEAD, retryable. A room whose opening has no reply yet is KVD_BOOTSTRAPPING, or
 * aborting after its deadline (the late reply is followed by an abort); one whose opening
 * failed is KVD_FAILED. -KVD_E_GONE: the slot belongs to another room.
 */
int kvd_room_state(const struct kvd_room *room);
/* The same for many rooms at once; states[i] is the result of kvd_room_state().
 * Returns the number of rooms that are terminal or negative. */
size_t kvd_room_states(const struct kvd_room *const *rooms, size_t count, int *states);
/* State and values. 0 or -KVD_E_GONE. */
int kvd_room_read(const struct kvd_room *room, struct kvd_room_status *status_p);
/* Block until the state is `state` or a later one, or failed; returns the state, or
 * -KVD_E_NOREPLY. Polls the shared page with growing pauses of 20 µs … 1 ms. */
int kvd_room_wait(struct kvd_room *room, int state, int timeout_ms);
/*
 * Why the room failed, or is aborting: code, scope, whether another room may succeed, and
 * the daemon's text; NULL: it has not failed and is not aborting. (kvd_last_error() has
 * the error of the last *call*.) Valid until the room is closed. It queries the daemon
 * once, for at most timeout_ms; without a reply, or in a callback, the text is the
 * general meaning of the code.
 */
const struct kvd_error *kvd_room_why(struct kvd_room *room, int timeout_ms);
/* recv, pull, after failure: the pages of the view (NULL: "kv") that are complete, so
 * that only the others must be fetched elsewhere or computed. Bit i % 8 of bitmap[i /
 * 8] is the i-th page of the list that was bound; -KVD_E_TOOBIG if the bitmap is too
 * small, -KVD_E_STATE if the room has not failed. */
int kvd_room_landed(struct kvd_room *room, const char *view, int timeout_ms,
		    uint8_t *bitmap, size_t bitmap_bytes);

/* ---- peers, descriptor lists, one-sided transfers, notifications --------- */

/* The identifier and key of this session: any holder may read and write all of its
 * regions during the session. Prefer a secret with limited access: kvd_command() with
 * secret.create. */
struct kvd_session_key {
	uint64_t epoch;
	char secret[33]; /* hex */
};
int kvd_session_key(struct kvd_client *client, int timeout_ms,
		    struct kvd_session_key *key_p);
/* Make a session of another daemon (or of this one) usable in dlists: *attach_p, a
 * number of this client, is valid until kvd_close(). An asynchronous call sets it at
 * once; it is usable (else -KVD_E_BUSY) after on_done has reported 0. */
int kvd_peer_attach(struct kvd_client *client, const char *endpoint,
		    const struct kvd_session_key *key, const struct kvd_call *call,
		    uint64_t *attach_p);
/* 0 while the local daemon has not detected the end of that session; -KVD_E_PEER,
 * -KVD_E_SESSION …: why it ended, permanently. */
int kvd_peer_attached(struct kvd_client *client, uint64_t attach,
		      const struct kvd_call *call);
/* The same, checked by the session's own daemon in one round trip. Regions that the
 * session registered before it (even after it was attached) can be used in lists after
 * it. */
int kvd_peer_refresh(struct kvd_client *client, uint64_t attach,
		     const struct kvd_call *call);

/*
 * Lists, transfers and notifications. They never block and use memory shared with the
 * daemon: no system call while it is awake, one write() to wake it. Objects created by
 * these calls can be used by the others at once. Errors that only the daemon can detect
 * (unregistered memory, a lost peer) appear in the state, and kvd_xfer_error() and
 * kvd_dlist_error() get the text. The first such call of a session requests the shared
 * memory, one round trip. If that memory is full, or could not be created, the entries
 * are sent over the socket: still without blocking, -KVD_E_FULL when that is full, too
 * (retryable: kvd_poll() first). -KVD_E_LOST: no session (kvd_poll() reconnects); a
 * client creates its memory again after reconnecting.
 *
 * kvd_xfer_prepare() requests it now: for the whole session, any number of times. 0, or
 * -KVD_E_LOST.
 *
 * Limits: 65 536 lists and transfers at a time, -KVD_E_LIMIT for a transfer; a list may
 * have 2^22 rows. A list that does not fit the shared memory (over 64 MiB, or over 65
 * 536) is passed in a memfd: see kvd_dlist_state().
 */
int kvd_xfer_prepare(struct kvd_client *client);

/* `count` rows of `bytes`, `stride` apart; count 0 means 1 */
struct kvd_desc {
	uint64_t address;
	uint64_t bytes;
	uint64_t stride;
	uint64_t count;
};

/*
 * attach 0: own regions. `rows` is count x columns numbers of 64 bits: address, bytes
 * (columns 2); and a device that is ignored (3: the layout of a NIXL array); or address,
 * bytes, stride, count (4: struct kvd_desc). Copied twice before it returns: to the
 * daemon, and for a reconnect. -KVD_E_INVAL: no rows, or other columns; -KVD_E_BUSY: the
 * attachment is being created or restored.
 */
int kvd_dlist_prep(struct kvd_client *client, uint64_t attach, const void *rows,
		   size_t count, size_t columns, struct kvd_dlist **dlist_p);
/* 1: prepared; 0: not yet, but transfers may use it; -KVD_E_BUSY: not yet, and
 * transfers return -KVD_E_BUSY (it is passed in a memfd, or prepared again after a
 * reconnect); else the negative code of its failure. */
int kvd_dlist_state(const struct kvd_dlist *dlist);
/* Block until it is prepared: 0, -KVD_E_NOREPLY, or the code of its failure, with a
 * text. */
int kvd_dlist_wait(struct kvd_dlist *dlist, int timeout_ms);
/* The text of its failure; code 0: none. Blocks. */
int kvd_dlist_error(const struct kvd_dlist *dlist, int timeout_ms,
		    struct kvd_error *error_p);
/* Free it; its transfers continue. The handle is freed unless this fails. */
int kvd_dlist_release(struct kvd_dlist *dlist);

enum kvd_op { KVD_READ = 0, KVD_WRITE = 1 };

struct kvd_xfer_args {
	enum kvd_op op; /* read: remote to local */
	const struct kvd_dlist *local, *remote;
	const uint32_t *local_index, *remote_index; /* rows; NULL: all, in order */
	size_t local_index_count, remote_index_count;
	const void *notif; /* sent to the remote session after its data; or NULL */
	size_t notif_bytes;
};

/* Create a transfer without posting it: KVD_BOOTSTRAPPING. -KVD_E_INVAL, -KVD_E_RANGE:
 * rows of different number or length, an index outside its list, no rows. */
int kvd_xfer_make(struct kvd_client *client, const struct kvd_xfer_args *args,
		  struct kvd_xfer **xfer_p);
/*
 * Post a transfer that is new, or has ended. From now on its state refers to this post.
 * `notif`: replaces the notification; NULL: the same. -KVD_E_STATE: it has not ended yet.
 * A post that the daemon refuses is KVD_FAILED.
 */
int kvd_xfer_post(struct kvd_xfer *xfer, const void *notif, size_t notif_bytes);
/* As their room counterparts; kvd_xfer_wait(): the state when it has ended; returns at
 * once for one that was never posted. */
int kvd_xfer_state(const struct kvd_xfer *xfer);
int kvd_xfer_read(const struct kvd_xfer *xfer, struct kvd_room_status *status_p);
int kvd_xfer_wait(struct kvd_xfer *xfer, int timeout_ms);
/* The text of its failure; code 0: none. Blocks. */
int kvd_xfer_error(const struct kvd_xfer *xfer, int timeout_ms,
		   struct kvd_error *error_p);
/* It becomes KVD_FAILED when its I/O has stopped, unless it had completed. */
int kvd_xfer_cancel(struct kvd_xfer *xfer);
/*
 * Free it. A transfer in progress is canceled, and ends without a handle: the memory may
 * change until then. To stop its I/O first: kvd_xfer_cancel(), kvd_xfer_wait(), then
 * this. The handle is freed unless this fails.
 */
int kvd_xfer_release(struct kvd_xfer *xfer);

/* At most 1 MiB. There is no reply: a notification that cannot be delivered (the
 * session there has ended) is dropped and counted (notifications_total). Order: with
 * all posts of this client to the same attachment. */
int kvd_notif_send(struct kvd_client *client, uint64_t attach, const void *data,
		   size_t bytes);
/* Number of notifications waiting for kvd_notif_drain(), from shared memory. */
uint64_t kvd_notif_waiting(const struct kvd_client *client);
/* Fetch received notifications, some tens of KiB at a time: on_notif for each, oldest
 * first, before it returns. Returns the number, or a negative code: then none was
 * reported, and they follow with the next call. `from` identifies the sender's session.
 */
int kvd_notif_drain(struct kvd_client *client, int timeout_ms,
		    void (*on_notif)(void *arg, const char *from, const void *data,
				     size_t bytes),
		    void *arg);

#ifdef __cplusplus
}
#endif

#include "kvd_chunk.h"	/* chunks: KV that has a name */
#include "kvd_attend.h" /* attention where they are */
#include "kvd_cost.h"	/* route, fetch or recompute: what each costs */

#endif
