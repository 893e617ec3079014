/* SPDX-License-Identifier: Apache-2.0 */
/*
 * kvd.h: libkvd, the engine's side of a kvd daemon.
 *
 * An engine opens one client, registers its cache memory and a pool once, then
 * opens a room for each request, says what to move, and reads the room's state
 * from shared memory. Everything that talks to the daemon comes in several forms,
 * chosen by the last argument but the outputs, `call`:
 *
 *   NULL or on_done NULL   the call blocks until the answer, at most timeout_ms
 *   on_done set            the call queues the request and returns; on_done runs
 *                          later, inside kvd_poll() or any blocking call
 *   post set               rooms: written into shared memory, nobody waits or
 *                          answers; what is refused fails the room
 *
 * Results. Functions that return int give 0 or a negative kvd code
 * (-KVD_E_BUSY …); kvd_last_error() gives the text. Functions that return a
 * state give 0 … 4, or a negative code.
 *
 * Ownership. Strings, arrays and structs that are passed in are copied before
 * the call returns. Handles (region, pool, room, dlist, xfer) belong to their
 * client: each is freed by its own closing function once that succeeded, and
 * all that are left by kvd_close(). A blocking call that fails sets its handle
 * to NULL; should the daemon do the work after the caller's timeout,
 * libkvd undoes it. (kvd_room_open() keeps the handle with -KVD_E_NOREPLY and
 * -KVD_E_LOST, since bytes may be moving: its state says when they cannot any
 * more.) An asynchronous call sets its handle at once; the handle
 * stays, unusable, when on_done reports an error, until its closing function
 * frees it.
 *
 * Structs passed in: set all of it to zero first; zero means "the default".
 *
 * Units. Sizes and offsets in bytes, times in the unit of the name, tokens and
 * pages counted from 0, ranges half-open.
 *
 * Transfers, their lists and notifications never wait and take no `call`: they are
 * written into shared memory (kvd_xfer_post() and the like, below). What becomes of
 * them is read there, too, or waited for (kvd_xfer_wait(), kvd_dlist_wait()).
 *
 * Threads. A client and its handles are used by one thread at a time (one
 * client a thread, or a lock of yours). kvd_room_state(), kvd_room_states(),
 * kvd_room_read(), kvd_xfer_state(), kvd_xfer_read(), kvd_move_state() and
 * kvd_move_read() are the exception: any thread, any time between the handle's making and
 * its closing, no lock.
 *
 * fork. A client belongs to the process that opened it. In a child every call
 * gives -KVD_E_FORKED, except the reads just named and kvd_close(), which frees
 * the child's copies and says nothing to the daemon.
 *
 * Signals, stdio, environment: libkvd raises no SIGPIPE, prints nothing, and
 * reads KVD_SOCKET, KVD_NAME and KVD_RUN_DIR only.
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

/* 1 … 37 are the daemon's (stable; on the wire by name), 512 … are libkvd's. */
enum kvd_code {
	KVD_OK = 0,
	KVD_E_INVAL = 1,      /* a field has a value outside its limits */
	KVD_E_PROTO = 2,      /* a message breaks the protocol */
	KVD_E_TOOBIG = 3,     /* a line, list or frame over its cap */
	KVD_E_NOCMD = 4,      /* no such command */
	KVD_E_PERM = 5,	      /* not allowed for this caller */
	KVD_E_NOTFOUND = 6,   /* no such object in this session */
	KVD_E_EXIST = 7,      /* exists already, with other content */
	KVD_E_BUSY = 8,	      /* in use now */
	KVD_E_LIMIT = 9,      /* a configured cap is reached */
	KVD_E_NOMEM = 10,     /* out of memory, here or there */
	KVD_E_STATE = 11,     /* not possible in the object's state */
	KVD_E_LAYOUT = 12,    /* the two sides' layouts contradict */
	KVD_E_COVER = 13,     /* no source holds a wanted interval */
	KVD_E_RANGE = 14,     /* outside a pool, region or list */
	KVD_E_DUP = 15,	      /* the same bytes were sent twice */
	KVD_E_SHORT = 16,     /* the last chunk left bytes missing */
	KVD_E_ABORTED = 17,   /* aborted by an engine */
	KVD_E_PEER = 18,      /* the remote daemon is gone */
	KVD_E_SESSION = 19,   /* the owning engine is gone */
	KVD_E_TIMEOUT = 20,   /* a phase of a room took longer than allowed */
	KVD_E_STALL = 21,     /* no byte moved for too long */
	KVD_E_LEASE = 22,     /* the offer's lease has ended */
	KVD_E_TRANSPORT = 23, /* the transport failed */
	KVD_E_REQUIRE = 24,   /* no allowed transport */
	KVD_E_IMPORT = 25,    /* memory of this kind cannot be used */
	KVD_E_FAULT = 26,     /* a region's memory vanished */
	KVD_E_FENCE = 27,     /* quiet could not be proven in time */
	KVD_E_DRAIN = 28,     /* the daemon is draining */
	KVD_E_RESTART = 29,   /* the other side is a new instance */
	KVD_E_VERSION = 30,   /* no common protocol version */
	KVD_E_AUTH = 31,      /* not authenticated */
	KVD_E_CANCELED = 32,  /* canceled by its owner */
	KVD_E_PLAN = 33,      /* the two sides' plans differ */
	KVD_E_REVOKED = 34,   /* the memory is no longer exported */
	KVD_E_CONFIG = 35,    /* the configuration is not usable */
	KVD_E_IO = 36,	      /* the operating system refused */
	KVD_E_INTERNAL = 37,  /* a fault of kvd itself */

	KVD_E_GONE = 512,     /* the status slot belongs to another object */
	KVD_E_NODAEMON = 513, /* no daemon answers on the socket */
	KVD_E_LOST = 514,     /* no session: libkvd reconnects, see kvd_reconnect() */
	KVD_E_NOREPLY = 515,  /* no answer within timeout_ms */
	KVD_E_FULL = 516,     /* libkvd's own queue is full: kvd_poll() first */
	KVD_E_FORKED = 517,   /* this client belongs to the parent process */
	KVD_E_DEAD = 518,     /* the own daemon's process is gone (rooms, xfers) */
};

struct kvd_error {
	int code;	   /* enum kvd_code, positive */
	bool retryable;	   /* the same call may succeed later */
	char scope[16];	   /* how far it reaches: op room peer session device daemon */
	char message[320]; /* one line, names the field and the limit */
};

/* What the client's last failed call found; never NULL. Valid until its next
 * call. `client` NULL: what this thread's last failed kvd_open(),
 * kvd_memory_alloc(), kvd_adopt() or kvd_layout_text() found. */
const struct kvd_error *kvd_last_error(const struct kvd_client *client);
/* "EINVAL"…, "EGONE"…; "EUNKNOWN" for no code. Takes either sign. */
const char *kvd_code_name(int code);
/* "failed" "bootstrapping" "waiting_for_input" "transferring" "success". */
const char *kvd_state_name(int state);
const char *kvd_version(void); /* "0.1.0" */

/* ---- client ------------------------------------------------------------- */

struct kvd_options {
	const char *socket; /* path; NULL: kvd_socket_find() */
	const char *name; /* instance name, when socket is NULL: <run dir>/<name>.sock */
	const char *client;	  /* what this engine calls itself; NULL: "libkvd" */
	const char *role;	  /* "prefill", "decode" or NULL */
	int timeout_ms;		  /* default of every call; 0: 10 000 */
	unsigned int max_pending; /* unanswered requests; 0: 4096 */
	size_t max_queued_bytes;  /* unsent bytes; 0: 8 MiB */
	bool manual_reconnect;	  /* a lost connection waits for kvd_reconnect() */
};

/* What `hello` told. */
struct kvd_daemon_info {
	char daemon[64];    /* "kvd 0.1.0" */
	char name[64];	    /* the instance's name */
	char instance[33];  /* hex; a restarted daemon has a new one */
	char endpoint[128]; /* what other daemons dial: "tcp://10.0.0.2:7400" */
	int pid;	    /* in our PID namespace, as the kernel says; 0: not visible */
	uint64_t session;
	uint64_t epoch; /* names this session to others (kvd_peer_attach) */
	uint32_t slots; /* of the status page */
};

/*
 * The control socket: <run dir>/<name>.sock when name is not NULL; else $KVD_SOCKET;
 * else <run dir>/$KVD_NAME.sock; else the only *.sock in the run dir ($KVD_RUN_DIR, or
 * /run/kvd).
 * -KVD_E_NODAEMON: none, or several (*why says which), -KVD_E_TOOBIG: path.
 */
int kvd_socket_find(const char *name, char *path, size_t path_bytes,
		    struct kvd_error *why);

/* Connect and greet; blocks at most options->timeout_ms. `options` may be NULL. */
int kvd_open(const struct kvd_options *options, struct kvd_client **client_p);
/*
 * End the session: the daemon aborts what runs and drops the regions. Pending
 * requests are forgotten, their on_done is not called. NULL is fine.
 * -KVD_E_STATE inside a callback: nothing is done.
 */
int kvd_close(struct kvd_client *client);
/*
 * When the connection ends (the daemon was restarted, or closed it), libkvd makes
 * a new session by itself: it connects, with pauses of 10 ms … 1 s between
 * attempts, and registers all regions and pools again under their old handles.
 * kvd_poll() takes the steps that are due and never waits for the daemon; a
 * blocking call connects at once if somebody listens and waits, within its own
 * time, for the registrations. While there is no session every call that needs one
 * gives -KVD_E_LOST, retryable, and takes the step that is due, so that an engine
 * which only repeats its call comes back, too; -KVD_E_STATE is for what can never
 * work.
 * Attachments and dlists are made again behind that: calls that name one wait for
 * it or, where they never wait, give -KVD_E_BUSY; -KVD_E_STATE once it cannot be (the
 * attached session is gone, too). Rooms and xfers of the old session are not resumed:
 * they end as the old session ends them (KVD_E_DEAD once its daemon's process is gone)
 * and wait to be closed. This session's own key (kvd_session_key) is a new one.
 *
 * kvd_lost(): there is no session now. kvd_reconnect(): a new one now, blocking,
 * whatever was; the only way with options->manual_reconnect.
 */
int kvd_reconnect(struct kvd_client *client, int timeout_ms);
bool kvd_lost(const struct kvd_client *client);
const struct kvd_daemon_info *kvd_daemon(const struct kvd_client *client);

/* ---- calls, answers, event loops ---------------------------------------- */

struct kvd_reply {
	const char *json;	       /* the answer's line; NULL when none came */
	const struct kvd_error *error; /* NULL when result is 0 */
};

struct kvd_call {
	int timeout_ms; /* 0: the client's default, negative: for ever */
	/* Exactly once for each request that was queued, except by kvd_close() and
	 * kvd_cancel(). `reply` is valid during the call. It may start asynchronous
	 * calls; blocking ones give -KVD_E_STATE. */
	void (*on_done)(void *arg, int result, const struct kvd_reply *reply);
	void *arg;
	/* Calls on rooms only: written into shared memory, without an answer; the rest of
	 * this struct is not looked at. See kvd_room_open(). */
	bool post;
};

/* The socket for select, poll, epoll; -1 while there is none. It changes with
 * every attempt to reconnect: ask after every call. Wait for kvd_events() (POLLIN,
 * perhaps POLLOUT; ask again after every call) or kvd_timeout_ms() (-1: nothing has a
 * deadline), then kvd_poll(client, 0). */
int kvd_fd(const struct kvd_client *client);
short kvd_events(const struct kvd_client *client);
int kvd_timeout_ms(const struct kvd_client *client);
/* Send, receive, run callbacks; wait at most timeout_ms for something to do.
 * How many requests ended, or -KVD_E_LOST while there is no session (all pending
 * ones have ended then; call it again, it reconnects). */
int kvd_poll(struct kvd_client *client, int timeout_ms);
unsigned int kvd_pending(const struct kvd_client *client);

/*
 * Any command of the control protocol: `args` is a JSON object without "cmd"
 * and "id" (NULL: {}), `fds` go with it (not closed). *id_p (may be NULL) names
 * the request for kvd_cancel(). Never blocks: call->on_done is required.
 */
int kvd_submit(struct kvd_client *client, const char *cmd, const char *args,
	       const int *fds, unsigned int fd_count, const struct kvd_call *call,
	       uint64_t *id_p);
/* Forget a kvd_submit(): on_done will not run. The daemon may still do it. */
int kvd_cancel(struct kvd_client *client, uint64_t id);
/* The same, blocking; *reply_p is the answer's line, also when it is an error
 * answer (NULL when none came). Free it with kvd_string_free(). */
int kvd_command(struct kvd_client *client, const char *cmd, const char *args,
		int timeout_ms, char **reply_p);
void kvd_string_free(char *string);

/* ---- memory and regions -------------------------------------------------- */

/*
 * Cache memory as kvd likes it best: a memfd sealed against shrinking and
 * growing, mapped on a 2 MiB boundary, populated here (so the pages are charged
 * to this process) and collapsed into huge pages where the kernel can.
 */
struct kvd_memory {
	int fd;
	void *address;
	size_t bytes;	   /* asked for, rounded up to 2 MiB */
	size_t huge_bytes; /* of which lie in huge pages */
};

/* `name` shows in /proc/PID/maps. -KVD_E_NOMEM, -KVD_E_IO. No client needed. */
int kvd_memory_alloc(size_t bytes, const char *name, struct kvd_memory *memory_p);
/* Unmap and close; a region made of it is unregistered first. */
void kvd_memory_free(struct kvd_memory *memory);

/*
 * Adopt: move memory that this process already has behind a memfd, in place, so
 * that the daemon can map it and one copy is enough. Addresses and bytes stay;
 * the region of it is registered by address as KVD_REGION_VM (libkvd finds that
 * it is adopted, and hands over the memfd) or by fd and offset.
 *
 * Other threads may go on reading and writing: each slice is write-protected
 * (userfaultfd), copied and replaced, and a store that comes meanwhile waits, so
 * none is lost. Where the process may not use userfaultfd that is -KVD_E_PERM,
 * unless `quiet` promises that nobody writes until the call returns. With the
 * unprivileged kind of userfaultfd only stores wait; a system call that writes
 * into a slice at that moment (read(), recv()) fails with EFAULT.
 *
 * What is taken: a chunk of 32 MiB or more that glibc's malloc mapped for one
 * allocation, by the pointer that it gave; or, with `vouched`, any private
 * anonymous memory all pages of which are the caller's. Refused by name
 * (-KVD_E_IMPORT): shared, file-backed, heap, stack, huge TLB, and memory that is
 * registered with CUDA (adopt first, then cudaHostRegister).
 *
 * What changes, for good (it is never moved back): MADV_DONTNEED does not zero it,
 * realloc() must not be called on it; free() is fine. A child of fork() has a private
 * view of it: it writes for itself, and until it has written a page sees what its
 * parent writes there. What cannot be seen, and must not be: physical pages that somebody
 * else holds (RDMA registrations of another library, io_uring buffers, vfio, O_DIRECT in
 * flight) stay the old ones, so adopt before they are registered. Transfers by kvd or
 * process_vm_writev() into the memory must not be under way.
 *
 * One registry for the process: the same memory twice, or by another copy of
 * libkvd, is moved once and counted. 4096 ranges.
 */
struct kvd_adopt_args {
	void *address;
	size_t bytes;
	bool quiet;   /* nobody writes to it until the call returns */
	bool vouched; /* its pages are the caller's, whoever allocated it */
};

struct kvd_adopted {
	int fd;		 /* the registry's: do not close it */
	uint64_t offset; /* of `address` in it */
	void *address;	 /* as asked */
	size_t bytes;
	size_t huge_bytes; /* of its whole range in huge pages */
	bool moved;	   /* by this call; false: it was adopted before */
	bool waited;	   /* stores of others were made to wait (userfaultfd) */
	uint64_t id;	   /* for kvd_adopt_release() */
};

/* Any thread, no client needed. After a failure in the middle the memory is whole
 * and usable, and the same call goes on where it stopped: -KVD_E_NOMEM, _PERM,
 * _IMPORT, _INVAL, _LIMIT, _IO. */
int kvd_adopt(const struct kvd_adopt_args *args, struct kvd_adopted *adopted_p);
/* One reference less. The memory stays as it is; the memfd is closed when there is
 * no reference and the memory is unmapped. -KVD_E_NOTFOUND: no such reference. */
int kvd_adopt_release(struct kvd_adopted *adopted);

enum kvd_region_kind {
	KVD_REGION_MEMFD = 0, /* fd; sealed by the daemon when it is not yet */
	/* POSIX shared memory, by name or fd; a memfd that cannot be sealed. No adapter
	 * has it, for its owner can cut it */
	KVD_REGION_SHM = 1,
	/* any memory of this process; staged, slower. What was adopted goes as memfd */
	KVD_REGION_VM = 2,
	/* GPU memory of cuMemAlloc or cudaMalloc: the allocation's IPC handle */
	KVD_REGION_CUDA_IPC = 3,
	KVD_REGION_CUDA_VMM = 4, /* of cuMemCreate: an exported fd */
	KVD_REGION_DMABUF = 5,	 /* a dma-buf fd: for RDMA adapters alone */
	/* bytes of a file, for transfers of this client's own by address (dlists) */
	KVD_REGION_FILE = 6,
};

#define KVD_FILE_ADDRESS (UINT64_C(1) << 62) /* up to 2^63 */

struct kvd_region_args {
	enum kvd_region_kind kind;
	/* memfd, cuda_vmm, dmabuf, file, shm without shm_name: duplicated for
	 * kvd_reconnect() */
	int fd;
	const char *shm_name; /* shm: "/name"; NULL: by its fd */
	uint64_t offset;      /* into the object, allocation or file */
	uint64_t bytes;
	/* this process's address of byte 0: required for vm and for dlists. file:
	 * required, any number from KVD_FILE_ADDRESS on, by which lists name its bytes */
	const void *address;
	const char *name; /* for people; may be NULL */
	/* cuda_ipc, cuda_vmm: the GPU, by UUID ("GPU-…") or PCI id. Never a number: it
	 * means another GPU in each process */
	const char *device;
	/* cuda_ipc: the 64 bytes of cuIpcGetMemHandle. The handle is of the whole
	 * allocation, whatever pointer it was asked for: `offset` is the pointer minus
	 * the base of cuMemGetAddressRange (PyTorch hands out sub-ranges) */
	const void *ipc_handle;
	uint64_t allocation; /* cuda_vmm: bytes given to cuMemCreate */
};

/*
 * Hand memory to the daemon. Answered when it is imported and populated. The
 * same memory twice gives two handles of one daemon region. A vm region lets the
 * daemon read and write all memory of this process, by a descriptor of /proc/self/mem
 * that goes with the registration; prctl PR_SET_PTRACER, which names the last daemon
 * only, lets it open that once more for other daemons of its user. -KVD_E_PERM,
 * -KVD_E_IMPORT: it cannot be had here; memfd can.
 *
 * A file is a regular file of a local file system or a block device, opened by the
 * caller as its transfers need it; the daemon opens none. Reading past its end fails
 * the transfer, writing past it makes it longer. What is on the disk after a loss of
 * power is for the caller's fsync() to say.
 */
int kvd_region_register(struct kvd_client *client, const struct kvd_region_args *args,
			const struct kvd_call *call, struct kvd_region **region_p);
/* Whole `memory` as one region. */
int kvd_region_memory(struct kvd_client *client, const struct kvd_memory *memory,
		      const struct kvd_call *call, struct kvd_region **region_p);
/* -KVD_E_BUSY while a pool uses it. After success nothing touches the memory.
 * Frees the handle on success. */
int kvd_region_unregister(struct kvd_region *region, const struct kvd_call *call);
uint64_t kvd_region_id(const struct kvd_region *region); /* 0: not registered now */

/* ---- layouts and pools --------------------------------------------------- */

/* The affine map of one field (docs/internals/layouts.md): where byte 0 of
 * (page, token, unit) lies: offset + page * page_stride + token * token_stride
 *       + (unit - first_unit) * unit_stride. */
struct kvd_field {
	const char *name; /* "k", "v", … */
	uint32_t buffer;  /* of kvd_layout_buffer() */
	uint64_t offset, page_stride, token_stride, unit_stride, unit_bytes;
	uint32_t first_unit, units, total_units;
	/* What the bytes are, up to 15 bytes: "bf16"; NULL: not told. Rooms between
	 * pools that tell different ones fail. */
	const char *format;
};

enum kvd_head_order {
	KVD_NHD = 0, /* in a page: token, head, dim */
	KVD_HND = 1, /* in a page: head, token, dim */
};

/*
 * Build a pool's layout text. A builder keeps its first error (out of memory, a
 * bad index), which kvd_layout_text() reports; the calls before need no check.
 * Not bound to a client.
 */
struct kvd_layout *kvd_layout_new(uint32_t rank); /* NULL: out of memory */
void kvd_layout_free(struct kvd_layout *layout);
uint32_t kvd_layout_buffer(struct kvd_layout *layout, uint64_t bytes);
uint32_t kvd_layout_view(struct kvd_layout *layout, const char *name,
			 uint32_t page_tokens, uint32_t pages);
/* The view holds token t of a request only when (t / run) % size == rank (context
 * parallelism); its pages hold these and no others. */
void kvd_layout_shard(struct kvd_layout *layout, uint32_t view, uint32_t size,
		      uint32_t rank, uint32_t run);
void kvd_layout_field(struct kvd_layout *layout, uint32_t view, uint32_t layer,
		      const struct kvd_field *field);
/*
 * A dense attention field: pages one after another from field->offset on.
 * Reads name, buffer, offset, unit_bytes (one head of one token), first_unit,
 * units, total_units; page_stride 0: units * unit_bytes * page_tokens; the
 * other strides follow from the order.
 */
void kvd_layout_heads(struct kvd_layout *layout, uint32_t view, uint32_t layer,
		      enum kvd_head_order order, const struct kvd_field *field);
/* *text_p belongs to the layout. */
int kvd_layout_text(struct kvd_layout *layout, const char **text_p);

struct kvd_pool_args {
	const char *name;   /* pools of one name are meant to match; NULL: "kv" */
	const char *layout; /* JSON text (see struct kvd_field); kvd_layout_text() */
	struct kvd_region *const *regions; /* one for each of the layout's buffers */
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
	KVD_SEND = 0,  /* push, prefill side */
	KVD_RECV = 1,  /* push, decode side */
	KVD_OFFER = 2, /* pull, prefill side: pages that may be fetched */
	KVD_PULL = 3,  /* pull, decode side */
};

/* Pages of one view, and what of them is meant. */
struct kvd_view {
	const char *name; /* NULL: "kv" */
	const uint32_t *pages;
	size_t page_count;
	uint64_t first_token; /* the request's token in the first slot of pages[0] */
	uint64_t token_begin, token_end; /* both 0: all that the pages hold */
	uint32_t layer_begin, layer_end; /* both 0: all layers */
};

/*
 * "Not before": a point that the engine's stream must have passed before a chunk's
 * pages are read, or before anything lands in pages just freed. One of:
 *
 * a word     not before *(uint64_t *)(region + offset) >= value. The region must be
 *            sealed memory (memfd). kvd_timeline_mark() fills this in.
 * an event   not before this event of CUDA IPC (64 bytes of cuIpcGetEventHandle) has
 *            come. It must be recorded before the call, and neither recorded again nor
 *            destroyed before its bytes have left or landed, or the room has failed:
 *            the driver looks at the newest record, and takes an event that was never
 *            recorded for one that has come.
 */
struct kvd_wait {
	struct kvd_region *region; /* the word's; NULL: no word */
	uint64_t offset;
	uint64_t value;
	const void *ipc_event; /* NULL: no event */
	const char *device;    /* the event's GPU, by UUID or PCI id */
};

/*
 * A timeline: a word of its own that one CUDA stream raises as it goes. No CUDA
 * header or library takes part; `library` is the driver that the engine has loaded
 * (NULL: "libcuda.so.1"; version 12 or newer, else -KVD_E_REQUIRE). `stream` is a
 * CUstream (a cudaStream_t is one), whose context is current in the thread of these
 * calls; it must not be capturing a graph.
 *
 * mark: put the next number behind all that is in the stream by now, and say what to
 * wait for. Costs one write of the GPU's; never blocks.
 * close: before kvd_close(). -KVD_E_BUSY until the stream has passed the last mark.
 */
struct kvd_timeline;
int kvd_timeline_open(struct kvd_client *client, void *stream, const char *library,
		      int timeout_ms, struct kvd_timeline **timeline_p);
int kvd_timeline_mark(struct kvd_timeline *timeline, struct kvd_wait *wait_p);
bool kvd_timeline_passed(const struct kvd_timeline *timeline); /* the last mark */
int kvd_timeline_close(struct kvd_timeline *timeline, int timeout_ms);

/* Exactly one pool of the source's daemon must fit, else the room fails (KVD_E_INVAL).
 * Where that daemon serves several engines, `session`, or group and worker, name the one
 * that is meant; a ticket does not, it only keeps others out. */
struct kvd_source {
	const char *endpoint; /* the source's daemon; NULL: our own daemon, or `group` */
	const char *pool;     /* its pool's name; NULL: any */
	uint64_t session;     /* kvd_daemon()->epoch of the engine's client; 0: any */
	uint64_t room;	      /* its number of the room, when another_room is set */
	bool another_room;
	bool has_rank; /* its pool's rank, when pools of one name differ in it only */
	uint32_t rank;
	const struct kvd_view
		*views; /* pull: the source's pages; none: the whole offer */
	size_t view_count;
	/* Instead of an endpoint: who is at this place of a group, as the directory of
	 * the cluster says (docs/cluster.md). While nobody is there the room waits. */
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
	/* recv: how many each source serves, 0: 1; offer: how many pullers there are, 0:
	 * 1, unless they say it (receivers_told); pull: the same, which the offers are
	 * told and must agree with, 0: not told */
	uint32_t receivers;
	bool receivers_told;
	/* offer, pull: the local pages. A pull without any asks for the offers and keeps
	 * their leases; it is KVD_WAITING_FOR_INPUT when all are there, and reads when
	 * pages are bound (none at all give the offers back). */
	const struct kvd_view *views;
	size_t view_count;
	bool has_aux;	      /* offer, pull */
	uint32_t aux;	      /* slot of the view "aux" */
	struct kvd_wait wait; /* offer: before it is read; pull: before it lands */
	uint32_t lease_ms;    /* offer; 0: the daemon's default */
	uint32_t bootstrap_ms, waiting_ms, stall_ms; /* 0: the daemon's defaults */
	/*
	 * What the engine calls its request, and its span, or NULL: shown by kvd-ctl and
	 * in the log; those of a recv or pull also at the other side, if its room has
	 * none. request_id: 1 to 128 bytes of visible ASCII without " and \. traceparent:
	 * 00-TRACE-PARENT-FLAGS of W3C Trace Context, lower-case hex, 55 characters. Else
	 * -KVD_E_INVAL or -KVD_E_RANGE.
	 */
	const char *request_id, *traceparent;
	/*
	 * Who may take part; with neither, daemons of the own daemon's user (without
	 * keys: all). ticket: 32 hex digits, random, which whoever chose the number chose
	 * with it and gave to both sides; NULL: none. A source refuses who asks for its
	 * room with another or none (-KVD_E_AUTH there). peers: names of the daemon's
	 * curve_allow_file; no other daemon is a source or a receiver.
	 */
	const char *ticket;
	const char *const *peers;
	size_t peer_count;
};

struct kvd_bind_args {
	const struct kvd_view *views;
	size_t view_count;
	bool has_aux;
	uint32_t aux; /* slot of the view "aux" */
	struct kvd_wait wait;
};

struct kvd_send_args {
	uint64_t seq; /* 0, 1, …: the same seq twice is one chunk */
	const struct kvd_view *views;
	size_t view_count;
	bool last;
	bool has_aux;
	uint32_t aux;
	struct kvd_wait wait;
};

struct kvd_room_status {
	int state;	    /* enum kvd_state */
	unsigned int flags; /* KVD_FLAG_… */
	int error;	    /* enum kvd_code; 0 unless failed or aborting */
	bool retryable;
	uint64_t bytes;	     /* landed or sent so far */
	uint64_t total;	     /* expected; 0: not known yet; of a sender: at its end */
	uint64_t changed_ns; /* CLOCK_MONOTONIC of the last change of state; 0: not known
			      */
	/* Of rooms; larger ones are cut to the largest that the type holds. */
	int64_t first_token; /* as kvd_room_first_token(); -1: not known, or no sender */
	uint16_t done;	     /* sender: chunks that the daemon reads no more */
	uint32_t rows;	     /* of the plans made on this side */
	uint32_t moved_us;   /* between the first chunk and the last byte moved so far */
};

/*
 * Binds and chunks may follow before the answer; they fail as the opening does. Every
 * call on a room that has failed gives the room's own error, "room 42 failed: …".
 *
 * Posted (call->post): open, bind, send, extend, abort and close never wait, for an
 * answer or for the daemon, and take no system call while it is awake: a scheduler's loop
 * can do them. They are the same calls by another door and not a family of their own,
 * because they take the same arguments and mean the same; only who tells a refusal
 * differs. An answered call that is refused changes nothing, and says why. A posted one
 * returns 0, and what the daemon refuses (a page outside its view, a number that is open
 * already) fails the room: its state is KVD_FAILED, kvd_room_why() has the words. So an
 * engine that wants to hear refusals gives answered calls.
 *
 * - A room whose opening was posted takes posted binds, chunks and extensions only
 *   (-KVD_E_STATE); one that was opened by an answered call takes both, in the order of
 * the calls, posted ones once its opening is answered (-KVD_E_BUSY before).
 * - kvd_room_close(), posted, is for any state: what has not ended is aborted, and goes
 *   when it has quiesced, without a handle; its pages may change until then. To have them
 *   quiet first: abort, wait for the state, then close. The number may be opened again at
 *   once.
 * - Pages go in binary and are read beside the daemon's loop: 131 072 scattered pages
 * take 512 KiB of the 64 MiB that all entries under way share. -KVD_E_FULL: no room now,
 *   kvd_poll() and call again; -KVD_E_TOOBIG: there never is.
 * - The first of a session makes its shared memory, one round trip: kvd_xfer_prepare()
 *   has it made before. -KVD_E_NOCMD, -KVD_E_REQUIRE: the daemon cannot; give answered
 *   calls.
 */
int kvd_room_open(struct kvd_client *client, const struct kvd_room_args *args,
		  const struct kvd_call *call, struct kvd_room **room_p);
/* recv, and a pull that was opened without pages: where the bytes shall land. */
int kvd_room_bind(struct kvd_room *room, const struct kvd_bind_args *args,
		  const struct kvd_call *call);
/* send: one chunk. */
int kvd_room_send(struct kvd_room *room, const struct kvd_send_args *args,
		  const struct kvd_call *call);
/* offer: the lease is so long from now on, and each time that a puller extends it. */
int kvd_room_extend(struct kvd_room *room, uint32_t lease_ms,
		    const struct kvd_call *call);
/* Any state. The state becomes failed once nothing of the room can move. */
int kvd_room_abort(struct kvd_room *room, const char *reason,
		   const struct kvd_call *call);
/* Terminal rooms only (else -KVD_E_STATE), or posted any. Frees the handle on success. */
int kvd_room_close(struct kvd_room *room, const struct kvd_call *call);
/* The daemon's whole record, JSON; free it with kvd_string_free(). */
int kvd_room_show(struct kvd_room *room, int timeout_ms, char **json_p);

/*
 * The room's state: one atomic load from shared memory and, while the room is
 * not terminal, a look at the daemon's heartbeat (vDSO clock). No system call
 * as long as the daemon lives.
 *
 * Terminal (KVD_FAILED, KVD_SUCCESS) means quiesced: kvd and its peers touch the
 * room's memory on this side no more. While the heartbeat is old, a room that is
 * not terminal shows KVD_TRANSFERRING with KVD_FLAG_ABORTING, and KVD_E_NOREPLY where it
 * has no other error: the own daemon does not answer; keep its pages.
 * Once the daemon's process is gone it is KVD_FAILED, KVD_E_DEAD, retryable.
 * A room whose opening is unanswered is KVD_BOOTSTRAPPING, or aborting when its
 * deadline passed (the late answer is followed by an abort); one whose opening
 * failed is KVD_FAILED. -KVD_E_GONE: the slot belongs to another room.
 */
int kvd_room_state(const struct kvd_room *room);
/* The same for many at one moment; states[i] as kvd_room_state() would give. How many are
 * terminal or negative. */
size_t kvd_room_states(const struct kvd_room *const *rooms, size_t count, int *states);
/* State and figures. 0 or -KVD_E_GONE. */
int kvd_room_read(const struct kvd_room *room, struct kvd_room_status *status_p);
/* Block until the state is `state` or a later one, or failed; the state, or
 * -KVD_E_NOREPLY. Looks at the shared page with growing pauses of 20 µs … 1 ms. */
int kvd_room_wait(struct kvd_room *room, int state, int timeout_ms);
/*
 * Why the room failed, or is aborting: code, scope, whether another room may succeed,
 * and the daemon's words; NULL: it does neither. (kvd_last_error() is what the last
 * *call* found.) Good until the room is closed. It asks the daemon once, for at most
 * timeout_ms; where it does not get an answer, or in a callback, the code's general
 * meaning stands for the text.
 */
const struct kvd_error *kvd_room_why(struct kvd_room *room, int timeout_ms);
/* send: the first token that a receiver wants of the pool's first view, or of any view
 * if none wants that one (it has those before it already); -KVD_E_STATE until a receiver
 * has bound. From the status page where it is there (kvd_room_read() never asks). */
int kvd_room_first_token(struct kvd_room *room, int timeout_ms, uint64_t *token_p);
/* recv, pull, once failed: which pages of the view (NULL: "kv") are whole, so that
 * only the rest is fetched elsewhere or computed. Bit i % 8 of bitmap[i / 8] is
 * the i-th page of the list that was bound; -KVD_E_TOOBIG when the bitmap is too
 * small, -KVD_E_STATE when the room has not failed. */
int kvd_room_landed(struct kvd_room *room, const char *view, int timeout_ms,
		    uint8_t *bitmap, size_t bitmap_bytes);
uint64_t kvd_room_number(const struct kvd_room *room);

/* ---- peers, descriptor lists, one-sided transfers, notifications --------- */

int kvd_peer_connect(struct kvd_client *client, const char *endpoint,
		     const struct kvd_call *call);

/* This session's name and key: any holder may read and write all of its regions, as long
 * as it lives. Better is one with bounds: kvd_secret_create(). */
struct kvd_session_key {
	uint64_t epoch;
	char secret[33]; /* hex */
};
int kvd_session_key(struct kvd_client *client, int timeout_ms,
		    struct kvd_session_key *key_p);
/*
 * A key with bounds, of which others see no more: *grant_p is its number. The daemon
 * holds each list, transfer and notification against it when that begins; what has begun
 * finishes. It ends with the session, so after a restart another one is needed.
 */
struct kvd_secret_args {
	struct kvd_region *const *regions; /* NULL: all, also later ones */
	size_t region_count;
	bool write;	 /* may write, too */
	uint32_t ttl_ms; /* 0: as long as the session */
	const char
		*peer; /* the only daemon, by its name in curve_allow_file; NULL: any */
};
int kvd_secret_create(struct kvd_client *client, const struct kvd_secret_args *args,
		      int timeout_ms, struct kvd_session_key *key_p, uint64_t *grant_p);
/* These regions, too; count 0: all. */
int kvd_secret_extend(struct kvd_client *client, uint64_t grant,
		      struct kvd_region *const *regions, size_t count, int timeout_ms);
/* Nothing begins by it any more. */
int kvd_secret_revoke(struct kvd_client *client, uint64_t grant, int timeout_ms);
/* Make a session of another daemon (or of our own) usable in dlists: *attach_p,
 * a number of this client's, good until kvd_close(). */
int kvd_peer_attach(struct kvd_client *client, const char *endpoint,
		    const struct kvd_session_key *key, int timeout_ms,
		    uint64_t *attach_p);

/* The same, asynchronous: *attach_p is set at once and usable (else -KVD_E_BUSY) once
 * on_done told 0. */
int kvd_peer_attach_begin(struct kvd_client *client, const char *endpoint,
			  const struct kvd_session_key *key, const struct kvd_call *call,
			  uint64_t *attach_p);
/* 0 while our daemon knows nothing of an end of that session; -KVD_E_PEER,
 * -KVD_E_SESSION …: why it is gone, for good. */
int kvd_peer_attached(struct kvd_client *client, uint64_t attach,
		      const struct kvd_call *call);
/* The same by its own daemon, one round trip to there. What the session registered
 * before it (perhaps after it was attached) can be named in lists after it. */
int kvd_peer_refresh(struct kvd_client *client, uint64_t attach,
		     const struct kvd_call *call);

/*
 * Lists, transfers and notifications: without waiting, through memory shared with the
 * daemon; no system call while it is awake, one write() to wake it. What these calls
 * make is usable at once by the others; what only the daemon can know (memory that is
 * not registered, a peer that is gone) shows in the state, and kvd_xfer_error() and
 * kvd_dlist_error() ask for the text.
 *
 * The first of a session asks for the shared memory, one round trip. When that is
 * full, or could not be had, the same goes by the socket: still without waiting,
 * -KVD_E_FULL once that is full, too (retryable: kvd_poll() first). -KVD_E_LOST:
 * no session (kvd_poll() reconnects); a reconnected client makes its own memory anew.
 *
 * kvd_xfer_prepare() asks now: all of the session, as often
 * as it is called. 0, or -KVD_E_LOST.
 *
 * Bounds: 65 536 lists and transfers at a time, -KVD_E_LIMIT for a transfer; a list
 * may have 2^22 rows. One that finds no place in the shared memory (over 64 MiB, or
 * over 65 536) goes in a memfd: see kvd_dlist_state().
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
 * (columns 2); and a device that is not looked at (3: as a NIXL array lies in memory);
 * or address, bytes, stride, count (4: struct kvd_desc). Copied twice before it
 * returns: to the daemon, and for a reconnect. -KVD_E_INVAL: no rows, other columns;
 * -KVD_E_BUSY: the attachment is being made, or made again.
 */
int kvd_dlist_prep(struct kvd_client *client, uint64_t attach, const void *rows,
		   size_t count, size_t columns, struct kvd_dlist **dlist_p);
/* 1: prepared; 0: not yet, but transfers may name it; -KVD_E_BUSY: not yet, and they
 * get -KVD_E_BUSY (it goes in a memfd, or is prepared again after a reconnect); else
 * the negative code of why it is not. */
int kvd_dlist_state(const struct kvd_dlist *dlist);
/* Block until it is prepared: 0, -KVD_E_NOREPLY, or why it is not, with a text. */
int kvd_dlist_wait(struct kvd_dlist *dlist, int timeout_ms);
/* The text of its failure; code 0: there is none. Blocks. */
int kvd_dlist_error(const struct kvd_dlist *dlist, int timeout_ms,
		    struct kvd_error *error_p);
uint64_t kvd_dlist_count(const struct kvd_dlist *dlist); /* rows */
/* Free it; transfers made of it go on. The handle is gone unless this fails. */
int kvd_dlist_release(struct kvd_dlist *dlist);

enum kvd_op { KVD_READ = 0, KVD_WRITE = 1 };

struct kvd_xfer_args {
	enum kvd_op op; /* read: remote to local */
	const struct kvd_dlist *local, *remote;
	const uint32_t *local_index, *remote_index; /* rows; NULL: all, in order */
	size_t local_index_count, remote_index_count;
	const void *notif; /* told to the remote session after its data; or NULL */
	size_t notif_bytes;
};

/* A transfer that is not posted yet: KVD_BOOTSTRAPPING. -KVD_E_INVAL, -KVD_E_RANGE:
 * rows of another number or length, an index outside its list, no rows. */
int kvd_xfer_make(struct kvd_client *client, const struct kvd_xfer_args *args,
		  struct kvd_xfer **xfer_p);
/*
 * Post it: one that was made, or has ended. From now on the state is of this post.
 * `notif`: another notification than before; NULL: the same. -KVD_E_STATE: it has not
 * ended yet. A post that the daemon refuses is KVD_FAILED.
 */
int kvd_xfer_post(struct kvd_xfer *xfer, const void *notif, size_t notif_bytes);
/* As their room counterparts; kvd_xfer_wait(): the state once it has ended, at once
 * that of one that was never posted. */
int kvd_xfer_state(const struct kvd_xfer *xfer);
int kvd_xfer_read(const struct kvd_xfer *xfer, struct kvd_room_status *status_p);
int kvd_xfer_wait(struct kvd_xfer *xfer, int timeout_ms);
/* The text of its failure; code 0: there is none. Blocks. */
int kvd_xfer_error(const struct kvd_xfer *xfer, int timeout_ms,
		   struct kvd_error *error_p);
/* It is KVD_FAILED when nothing of it can move any more, unless it was faster. */
int kvd_xfer_cancel(struct kvd_xfer *xfer);
/*
 * Free it. What is under way is canceled, and ends without a handle: the memory may
 * change until then. To have it quiet first: kvd_xfer_cancel(), kvd_xfer_wait(), and
 * then this. The handle is gone unless this fails.
 */
int kvd_xfer_release(struct kvd_xfer *xfer);

/* At most 1 MiB. Not answered: what cannot be delivered (the session there is over)
 * is dropped and counted (notifications_total). Order: with all that this client
 * posts to the same attachment. */
int kvd_notif_send(struct kvd_client *client, uint64_t attach, const void *data,
		   size_t bytes);
/* How many wait for kvd_notif_drain(): a look at shared memory. */
uint64_t kvd_notif_waiting(const struct kvd_client *client);
/* Take what has arrived: on_notif for each, oldest first, before it returns.
 * How many, or a negative code: then none was told, and they come with the next call.
 * `from` names the sender's session. */
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
