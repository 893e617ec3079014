/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client: shared by the files of libkvd. Nothing here is exported (lib/libkvd.map); the
 * public contract is lib/kvd.h.
 *
 *   client.c         open, close
 *   client_session.c connect, greet, register again, reconnect
 *   client_conn.c    socket, queues, replies and deadlines
 *   client_call.c    requests, blocking and asynchronous; any command as JSON
 *   client_status.c  the mapped status page and the lock-free reads
 *   client_object.c  handles: references, phases
 *   client_region.c client_pool.c client_room.c client_peer.c   the commands
 *   client_ring.c    the submission ring
 *   client_dlist.c client_xfer.c client_notif.c   operations through the ring
 *   client_space.c   spaces of chunks
 *   client_order.c   ends waits of a GPU's stream
 *   client_chunk.c   holds, puts, fetches and other operations on chunks
 *   client_adopt*.c client_maps.c   memory moved behind a memfd (client_adopt.h)
 *   client_memory.c client_layout.c client_text.c client_error.c   helpers
 */
#ifndef KVD_PROTO_CLIENT_H
#define KVD_PROTO_CLIENT_H

#include <cjson/cJSON.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "daemon/base/list.h"
#include "proto/out.h"
#include "lib/kvd.h"

#define CLIENT_LINE_MAX (1u << 20)  /* bytes of a request, newline included */
#define CLIENT_REPLY_MAX (8u << 20) /* bytes of a reply: thousands of rooms */
#define CLIENT_FDS_MAX 16u
#define CLIENT_PATH_MAX 108
/* Linux 6.5; not in every libc's headers */
#define CLIENT_SO_PASSPIDFD 76
#define CLIENT_SCM_PIDFD 4

/* ---- text of a JSON line (client_text.c) ------------------------------------- */

void client_text_names(struct text *text, const char *name, const char *const *names,
		       size_t count);
/* "wait":{…}; nothing if there is no condition */
void client_text_wait(struct text *text, const char *name, const struct kvd_wait *wait);
/* -KVD_E_INVAL, -KVD_E_STATE */
int client_wait_check(struct kvd_client *client, const struct kvd_wait *wait);
/* It is a JSON object: -KVD_E_INVAL. */
int client_layout_check(struct kvd_client *client, const char *text);
/* "views":{…} */
void client_text_views(struct text *text, const struct kvd_view *views, size_t count);

/* ---- memory in huge pages (client_memory.c) -------------------------------- */

/* `bytes` of the fd at a 2 MiB boundary; NULL with errno. */
void *client_memory_map(int fd, size_t bytes);
/* Make all pages of a mapping of whole 2 MiB present, huge ones where the kernel
 * can: those are added to *huge_bytes_p. -KVD_E_NOMEM, -KVD_E_IO. */
int client_memory_fill(void *at, size_t bytes, size_t *huge_bytes_p);
/* For tests: the replacement of madvise(MADV_COLLAPSE); NULL: none. */
/* Pages that do not exist yet are created here: a daemon takes no memory with holes.
 * Memory that cannot be inspected or mapped is left to the daemon's reply.
 * -KVD_E_NOMEM. */
int client_memory_present(int fd, uint64_t offset, size_t bytes);
void client_memory_with(int (*collapse)(void *at, size_t bytes));

/* ---- the status page of one session -------------------------------------- */

enum client_health { CLIENT_ALIVE, CLIENT_STALE, CLIENT_DEAD };

struct client_map {
	unsigned int refs; /* the client, and every room and xfer of the session */
	const struct kvd_status_header *header;
	const struct kvd_status_slot *slots;
	size_t bytes;
	uint32_t slot_count;
	uint64_t heartbeat_interval_ns;
	int pidfd;	     /* of the daemon; -1: its process is not visible from here */
	atomic_bool suspect; /* the connection ended: check the pidfd now */
	atomic_bool ended;   /* set by the daemon: it accepts no more requests */
	atomic_bool dead;    /* sticky */
	_Atomic uint64_t asked_ns; /* time of the last check of the pidfd */
};

/* Takes pidfd, not page_fd. -KVD_E_PROTO with `why` if the page is invalid. */
int client_map_new(int page_fd, size_t bytes, uint32_t slots, int pidfd,
		   struct client_map **map_p, const char **why);
void client_map_unref(struct client_map *map);
enum client_health client_map_health(struct client_map *map);
/* Is the page's writer without a sign of life? Sets a text; "" and false if it is
 * alive, or if that is unknown (NULL). */
#define CLIENT_SILENCE_MAX 96
bool client_map_silence(struct client_map *map, char text[CLIENT_SILENCE_MAX]);

/* ---- requests and the connection ----------------------------------------- */

struct client_guard;
struct client_object;
struct client_request;

/* The typed part of a reply. reply: the parsed line when result is 0. Returns the
 * result for the caller (-KVD_E_PROTO for a reply without its fields). May run twice:
 * with -KVD_E_NOREPLY at the deadline, and with the late reply (req->late). */
typedef int client_finish(struct client_request *req, int result, const cJSON *reply);
/* The same for a call that only reads its reply, into `out`: of one that succeeded and
 * is in time. */
typedef int client_take(struct client_request *req, const cJSON *reply);

/* of a blocking call */
struct client_waiter {
	bool done, want_json;
	int result;
	char *json;
	struct kvd_error error;
};

struct client_request {
	struct list link; /* in conn.requests or conn.ready */
	struct kvd_client *client;
	uint64_t id;
	uint64_t deadline_ns;	      /* CLOCK_MONOTONIC; 0: none */
	struct client_object *object; /* a reference, or NULL */
	client_finish *finish;	      /* or NULL */
	client_take *take;	      /* the same */
	void *out;		      /* of a blocking call; not to be used when late */
	struct client_waiter *waiter;
	void (*on_done)(void *arg, int result, const struct kvd_reply *reply);
	void *arg;
	bool late; /* its caller has received -KVD_E_NOREPLY */
};

struct client_frame {
	struct list link;
	size_t len, sent;
	unsigned int fd_count;
	int fds[CLIENT_FDS_MAX]; /* our own duplicates */
	char *data;
};

struct client_conn {
	int fd; /* -1: lost */
	char *in;
	size_t in_len, in_cap, in_scanned;
	int in_fds[CLIENT_FDS_MAX]; /* received, not yet processed */
	unsigned int in_fd_count;
	pid_t sender;	    /* of the last message, by SCM_CREDENTIALS; 0: not known */
	int sender_pidfd;   /* the same, by SCM_PIDFD; -1: not supported by the kernel */
	struct list frames; /* unsent */
	size_t queued_bytes;
	struct list requests; /* unanswered, oldest first */
	struct list ready;    /* completed without the daemon */
	unsigned int pending;
	uint64_t next_deadline_ns; /* none is earlier; 0: no deadline at all */
};

#define KVD_IPC_BYTES 64u /* of a handle of CUDA IPC */

/* ---- ordered requests of attention (client_order.c) ----------------------- */

/* Of a seat. Written by the engine's thread, except `lost`. */
struct client_order {
	uint64_t last;		/* value of the last request */
	_Atomic uint64_t value; /* the same, 0: it was not sent */
	_Atomic uint64_t until_ns;
	_Atomic uint64_t lost; /* the value that the guard stored */
	_Atomic uint64_t *done;
};

/* From here on until client_guard_free(), each word `done` gets the value of its request
 * at the latest half a second after until_ns, or when the process of pidfd ends (-1:
 * unknown). Takes `orders`, also if it fails: -KVD_E_NOMEM. */
int client_guard_new(struct client_order *orders, uint32_t count, int pidfd,
		     struct client_guard **guard_p);
/* Requests without a result get their values now; in a forked child, whose they are not,
 * nothing is stored. NULL is fine. */
void client_guard_free(struct client_guard *guard);
/* The session has ended: no request gets a result any more. NULL is fine. */
void client_guard_lose(struct client_guard *guard);
/* The next request of a seat: its value. */
uint64_t client_order_next(struct client_guard *guard, uint32_t seat, uint64_t until_ns);
/* It was not sent, or the seat's next request is not ordered. Both are for a seat whose
 * last request has ended. */
void client_order_none(struct client_guard *guard, uint32_t seat);
/* Has the guard ended the last request? Then its results are not used, whichever state
 * the status word shows. */
bool client_order_lost(const struct client_guard *guard, uint32_t seat);

/* a request under construction */
struct client_op {
	struct text text; /* `{"id":…,"cmd":…` … without the last brace */
	uint64_t id;
	const int *fds;
	unsigned int fd_count;
	struct client_object *object;
	client_finish *finish;
	client_take *take;
	void *out;
	bool forced; /* libkvd's own clean-up: exempt from the limits */
};

void client_conn_init(struct client_conn *conn);
/* Drop everything; on_done is not called. */
void client_conn_fini(struct kvd_client *client);
/* Close the socket; every pending request ends with -KVD_E_LOST. */
/* by_daemon: the daemon closed it and reads no more requests. */
void client_conn_lost(struct kvd_client *client, bool by_daemon, const char *why);

/* Send as much as the socket accepts. false: the connection is broken (but not yet
 * declared lost: the daemon's last message may be readable). */
bool client_conn_flush(struct client_conn *conn);
void client_frame_free(struct client_conn *conn, struct client_frame *frame);

void client_op_begin(struct kvd_client *client, struct client_op *op, const char *cmd);
/* Queue it, and wait if `call` requests it. Consumes op. 0 = done or queued. */
int client_op_run(struct kvd_client *client, struct client_op *op,
		  const struct kvd_call *call);
/* The same, with what the reply says. */
int client_op_ask(struct kvd_client *client, struct client_op *op,
		  const struct kvd_call *call, client_take *take, void *out);
/* The same, blocking, with the line of the reply (also of an error reply). */
int client_op_json(struct kvd_client *client, struct client_op *op, int timeout_ms,
		   char **json_p);
/* Complete without the daemon: at once when blocking, else in kvd_poll(). */
int client_op_local(struct kvd_client *client, const struct kvd_call *call);
/* One turn: send, receive, expire, run callbacks; returns the number of requests that
 * ended. */
int client_conn_turn(struct kvd_client *client, int timeout_ms);
/* Deadline of a call: 0 is the client's default, negative never (UINT64_MAX). */
uint64_t client_until_ns(const struct kvd_client *client, int timeout_ms);
/* Between two polls of shared memory: process the socket, then pause with growing
 * length (*pause_ns, 0 at first). */
void client_pause(struct kvd_client *client, uint64_t *pause_ns);

/* ---- handles ------------------------------------------------------------- */

enum client_kind {
	CLIENT_REGION,
	CLIENT_POOL,
	CLIENT_ATTACH,
	CLIENT_ROOM,
	CLIENT_DLIST,
	CLIENT_XFER,
	CLIENT_SPACE,
	CLIENT_HOLD,
	CLIENT_MOVE,
	CLIENT_ATTEND,
	CLIENT_KINDS,
};

enum client_phase {
	CLIENT_MAKING, /* requested, no reply yet */
	CLIENT_READY,
	CLIENT_DOUBT,  /* requested, the caller has received "no answer" */
	CLIENT_FAILED, /* the daemon has no such object */
	CLIENT_CLOSED, /* closed there; the caller keeps the handle */
};

struct client_object {
	struct list link; /* in client->objects[kind] */
	struct kvd_client *client;
	void (*fini)(struct client_object *object);
	uint64_t id;
	enum client_kind kind;
	unsigned int refs;   /* one of the caller and one of each request */
	unsigned int serial; /* of the session that created it */
	unsigned int asked;  /* the last session with which it was registered */
	/* from here on: members that reads of thousands of objects use, close together */
	_Atomic uint32_t phase;
	bool lost; /* FAILED because it could not be restored */
};

void client_object_init(struct kvd_client *client, struct client_object *object,
			enum client_kind kind, void (*fini)(struct client_object *));
void client_object_ref(struct client_object *object);
void client_object_unref(struct client_object *object);
enum client_phase client_object_phase(const struct client_object *object);
void client_object_enter(struct client_object *object, enum client_phase phase);
/* Is there a session, and was it created in that one? */
bool client_object_current(const struct client_object *object);
/* Does the daemon know it in this session? Else -KVD_E_STATE or _LOST. */
int client_object_usable(struct client_object *object, const char *what);

/* The client_finish of regions, pools and dlists under construction. */
int client_object_made(struct client_request *req, int result, const cJSON *reply);
/* The same for objects registered again: the handle stays on record. */
int client_object_again(struct client_request *req, int result, const cJSON *reply);
/* The client_finish of a closing command: frees the handle if it is in time. */
int client_object_gone(struct client_request *req, int result, const cJSON *reply);
/* The complete closing function of regions, pools and dlists. */
int client_object_close(struct client_object *object, const struct kvd_call *call);
/* Free a handle that the daemon does not have. */
int client_object_forget(struct client_object *object, const struct kvd_call *call);
/* An object named by a call must exist in this session; -KVD_E_BUSY: its registration
 * is in progress. */
int client_prepared(struct kvd_client *client, const struct client_object *object,
		    const char *what);
/* Translates the caller's number of an attachment to the daemon's. A blocking call
 * waits for one that is being restored, another returns -KVD_E_BUSY. */
int client_attach_id(struct kvd_client *client, uint64_t *attach_p,
		     const struct kvd_call *call);
/* The same for objects restored after it. 1: not there yet. */
int client_attach_again_id(struct kvd_client *client, uint64_t number,
			   uint64_t *attach_p);
/* The daemon's id; 0: not registered in this session. */
uint64_t client_object_id(const struct client_object *object);

/* Common part of rooms and xfers: a slot of the status page. */
struct client_slot {
	struct client_object object;
	struct client_map *map;	 /* a reference; NULL only if never requested */
	uint64_t number;	 /* rooms: the `object` value of the slot */
	uint32_t slot;		 /* valid from CLIENT_READY on, as gen */
	_Atomic uint32_t gen;	 /* incremented by every post of a transfer */
	atomic_bool posted;	 /* by kvd_xfer_post() */
	bool numbered;		 /* numbered here: client_ring_slot() */
	uint32_t before;	 /* if numbered: generation of the slot's previous
				  * object */
	int error;		 /* kvd code, valid in CLIENT_FAILED */
	struct kvd_error *fault; /* the same with its text, for kvd_room_why(); may be
				  * NULL */
};

struct kvd_dlist {
	struct client_slot slot; /* used if `numbered` */
	uint64_t rows;
	uint64_t attach; /* the caller's number; 0: own memory */
	size_t count, columns;
	uint64_t *table; /* as kvd_dlist_prep(), to be prepared again */
};

struct kvd_xfer {
	struct client_slot slot;
};

struct kvd_room {
	struct client_slot slot;
	enum kvd_role role;
	bool asked; /* slot.fault is kvd_room_why()'s */
	bool told;  /* and the last status word */
};

/* For an object created in the current session (client->map exists). */
void client_slot_init(struct client_slot *slot, uint64_t number);
int client_slot_state(const struct client_slot *slot);
/* For many objects, as kvd_room_states(); of: for slot_at(). */
size_t client_slot_states(const struct client_slot *(*slot_at)(const void *of, size_t i),
			  const void *of, size_t count, int *states);
int client_slot_read(const struct client_slot *slot, struct kvd_room_status *status_p);
/* Wait until state >= `state`, failed or replaced; the state or -KVD_E_NOREPLY. */
int client_slot_wait(struct client_slot *slot, int state, int timeout_ms);
/* The client_finish of a command that opens an object with a slot of the daemon's;
 * `undo` ends one that its caller does not expect any more. */
int client_slot_made(struct client_request *req, int result, const cJSON *reply,
		     void (*undo)(struct client_slot *slot));
void client_slot_fini(struct client_slot *slot);

struct kvd_space {
	struct client_object object;
};
struct kvd_hold;
/* The daemon's number of it; 0: no reply yet. */
uint64_t client_hold_id(const struct kvd_hold *hold);

/* ---- the submission ring ----------------------------------------------------- */

struct client_ring;
struct kvd_ring_entry;

/* a released slot; gen 0: no entry of it is in progress */
struct client_left {
	uint32_t slot, gen;
};

/* of the session: slots numbered by the client */
struct client_slots {
	uint32_t fresh; /* number of slots used at least once */
	uint32_t out;	/* in use, or waiting in the queue: at most cap */
	struct client_left *queue;
	uint32_t cap, front, waiting;
};

/* of a payload */
struct client_part {
	const void *data;
	size_t bytes;
};

/* client_enter() for calls that never wait; requests a ring. */
int client_ring_begin(struct kvd_client *client);
/* Number the object (a slot, its next generation, an id) and submit the entry that
 * makes it; `object` as in client_ring_put(). */
int client_slot_make(struct client_slot *slot, struct kvd_ring_entry *entry,
		     const struct client_part *parts, size_t count,
		     struct client_object *object);
/* An entry without a payload about an object that was made so. */
int client_slot_tell(const struct client_slot *slot, unsigned int op);
/* The object ends; the slot is reused when the daemon has released it, too. */
void client_ring_slot_back(struct kvd_client *client, const struct client_slot *slot);
/* Submit the entry, by the ring or else the socket; on failure the daemon has received
 * nothing. */
int client_ring_put(struct kvd_client *client, struct kvd_ring_entry *entry,
		    const struct client_part *parts, size_t count,
		    struct client_object *object);
void client_ring_lost(struct kvd_client *client); /* the session has ended */

/* The closing function of lists and transfers: never waits. */
int client_slot_release(struct client_slot *slot);
/* The daemon refused it over the socket; for client->error. */
void client_slot_refused(struct client_slot *slot);
/* The error of its failure, from the daemon if it has kept the text. Blocks. */
int client_slot_error(const struct client_slot *slot, int timeout_ms,
		      struct kvd_error *error_p);
/* -KVD_E_TOOBIG */
int client_notif_check(struct kvd_client *client, size_t bytes);

/* ---- rooms that are posted (client_room_post.c) -------------------------------- */

/* Does the daemon know the op, and is there a ring for it? */
int client_post_begin(struct kvd_client *client, unsigned int op);
/* The entry's payload is views, then text: both taken. An OPEN numbers the room. */
int client_post_pages(struct kvd_room *room, struct kvd_ring_entry *entry,
		      const struct kvd_view *views, size_t view_count, struct text *text);
/* The same for any slot; `ids` (NULL: none): entry->n0 of them before the views. */
int client_post_views(struct client_slot *slot, struct kvd_ring_entry *entry,
		      const void *ids, const struct kvd_view *views, size_t view_count,
		      struct text *text);
int client_post_abort(struct kvd_room *room, const char *reason);
int client_post_close(struct kvd_room *room);	    /* frees the handle on success */
int client_post_close_entry(struct kvd_room *room); /* the handle stays */

/* The session has ended: streams that wait for its requests go on. */
void client_attends_lost(struct kvd_client *client);

/* ---- sessions ------------------------------------------------------------ */

enum client_stage {
	CLIENT_DOWN,	    /* no session */
	CLIENT_GREETING,    /* hello has been sent */
	CLIENT_REGISTERING, /* and the recorded objects */
	CLIENT_UP,
};

struct client_again {
	bool manual; /* only kvd_reconnect() starts */
	enum client_stage stage;
	bool failed;	    /* end this attempt, with `why` */
	unsigned int open;  /* registrations unanswered */
	unsigned int tries; /* since the last stable session */
	uint64_t up_ns;
	uint64_t retry_ns;    /* DOWN: when the next attempt is due */
	uint64_t redo_ns;     /* UP: when to restore failed objects; 0: none failed */
	uint64_t until_ns;    /* of an attempt with a waiting caller; 0: none */
	uint64_t hello_ns;    /* GREETING: when hello was sent */
	struct kvd_error why; /* of the last attempt; code 0: none failed */
};

/* Open a new session in any case; blocks. 0, or the reason for none. */
int client_session_open(struct kvd_client *client, int timeout_ms);
/* Take the steps that are due, after each turn; never waits. */
void client_session_step(struct kvd_client *client);
/* The connection was lost; from client_conn_lost(). */
void client_session_lost(struct kvd_client *client);
/* When the next step is due without an event; false: none is. */
bool client_session_due(const struct kvd_client *client, uint64_t *due_p);
/* Send the registration of op->object once more. */
int client_session_again(struct client_op *op);
void client_session_answered(struct client_object *object, int result);
/*
 * Every call that needs the session starts here, before it checks a handle: without a
 * session it returns -KVD_E_LOST, retryable, never the handle's -KVD_E_STATE. need()
 * takes the due steps to a new session and never waits; check() takes none. begin() is
 * client_enter() and need(); a blocking one detects the end of the connection, connects
 * again if a daemon listens, and waits for the registrations, at most for the call's
 * time.
 */
int client_session_check(struct kvd_client *client);
int client_session_need(struct kvd_client *client);
int client_begin(struct kvd_client *client, const struct kvd_call *call);

/* ---- the client ---------------------------------------------------------- */

struct kvd_client {
	pid_t owner;
	char path[CLIENT_PATH_MAX];
	char name[64], role[16];
	int timeout_ms;
	unsigned int max_pending;
	size_t max_queued_bytes;
	bool in_callback;
	unsigned int serial;		 /* counts sessions; 0: none yet */
	uint64_t next_request, attaches; /* attaches: ever made */
	struct client_conn conn;
	struct client_again again;
	struct client_map *map;	  /* of the current session */
	struct client_ring *ring; /* the same; NULL: use the socket */
	unsigned int ring_asked;  /* serial of the session that was asked for a ring */
	uint64_t ring_ops;	  /* 1 << op for the ops known to its daemon */
	unsigned int submits;	  /* entries on the socket; later ones must use it, too */
	struct client_slots slots;
	uint64_t notifs_taken; /* in this session */
	uint64_t notifs_waiting;
	cJSON *notifs_kept; /* those: fetched, and not reported yet; NULL: none was
			     * ever received */
	struct kvd_daemon_info info;
	struct kvd_error error;
	struct list objects[CLIENT_KINDS];
};

/* -KVD_E_FORKED, -KVD_E_STATE in a callback (blocking calls only), else 0. */
int client_enter(struct kvd_client *client, bool blocks);
bool client_blocks(const struct kvd_call *call);
/* The `call` of functions that never wait: without a completion. */
extern const struct kvd_call client_never_waits;
/* In a new session: register again under the existing handle. */
int client_region_again(struct kvd_region *region);
int client_pool_again(struct kvd_pool *pool);
const char *client_pool_layout(const struct kvd_pool *pool);
/* Where a buffer of its layout lies in this process. -KVD_E_REQUIRE. */
int client_pool_address(const struct kvd_pool *pool, uint32_t buffer, uint64_t *address_p,
			bool *gpu_p);
/* 1: unknown; -1: neither host memory nor a GPU's. */
int client_region_address(const struct kvd_region *region, uint64_t *address_p,
			  bool *gpu_p);
int client_attach_again(struct client_object *object);
int client_dlist_again(struct client_object *object); /* 1: later */

/* Record an error and return -code. */
int client_fail(struct kvd_client *client, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
int client_fail_nomem(struct kvd_client *client);
void client_error_set(struct kvd_error *error, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* From an error reply; always sets an error. */
void client_error_parse(struct kvd_error *error, const cJSON *reply);
struct kvd_error *client_error_thread(void);

/* Members of a reply; false if absent or of another type. */
bool client_get_u64(const cJSON *reply, const char *name, uint64_t *out_p);
const char *client_get_str(const cJSON *reply, const char *name);

#endif
