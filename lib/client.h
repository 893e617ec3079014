/* SPDX-License-Identifier: Apache-2.0 */
/*
 * client: what the files of libkvd share. Nothing here is exported
 * (lib/libkvd.map); the public contract is lib/kvd.h.
 *
 *   client.c         open, close
 *   client_session.c connect, greet, register again, reconnect
 *   client_conn.c    socket, queues, answers and deadlines
 *   client_call.c    making requests, blocking and not; any command as JSON
 *   client_status.c  the mapped status page and the lock-free reads
 *   client_object.c  handles: references, phases
 *   client_region.c client_pool.c client_room.c client_peer.c   the commands
 *   client_ring.c    the submission ring
 *   client_dlist.c client_xfer.c client_notif.c   what goes through it
 *   client_space.c   spaces of chunks
 *   client_chunk.c   holds, puts, fetches and others of chunks
 *   client_adopt*.c client_maps.c   memory moved behind a memfd (client_adopt.h)
 *   client_memory.c client_layout.c client_text.c client_error.c   helpers
 */
#ifndef KVD_PROTO_CLIENT_H
#define KVD_PROTO_CLIENT_H

#include <cjson/cJSON.h>
#include <stdatomic.h>
#include <sys/types.h>

#include "daemon/base/list.h"
#include "daemon/base/text.h"
#include "lib/kvd.h"

#define CLIENT_LINE_MAX (1u << 20)  /* bytes of a request, newline included */
#define CLIENT_REPLY_MAX (8u << 20) /* bytes of an answer: rooms by the thousand */
#define CLIENT_FDS_MAX 16u
#define CLIENT_PATH_MAX 108
/* Linux 6.5; not in every libc's headers */
#define CLIENT_SO_PASSPIDFD 76
#define CLIENT_SCM_PIDFD 4

/* ---- text of a JSON line (client_text.c) ------------------------------------- */

void client_text_printf(struct text *text, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
/* ,"name":… members of an object that has at least one. Nothing for NULL. */
void client_text_str(struct text *text, const char *name, const char *value);
void client_text_int(struct text *text, const char *name, uint64_t value);
void client_text_some(struct text *text, const char *name, uint64_t value); /* not 0 */
void client_text_u64(struct text *text, const char *name, uint64_t value);
/* ,"wait":{…}; nothing where there is nothing to wait for */
void client_text_wait(struct text *text, const struct kvd_wait *wait);
/* The object alone, in an empty text. */
void client_text_wait_object(struct text *text, const struct kvd_wait *wait);
/* -KVD_E_INVAL, -KVD_E_STATE */
int client_wait_check(struct kvd_client *client, const struct kvd_wait *wait);
/* It is a JSON object: -KVD_E_INVAL. */
int client_layout_check(struct kvd_client *client, const char *text);
/* "views":{…}, after a comma unless it is its object's first member */
void client_text_views(struct text *text, bool first, const struct kvd_view *views,
		       size_t count);

/* ---- memory in huge pages (client_memory.c) -------------------------------- */

/* `bytes` of the fd at a 2 MiB boundary; NULL with errno. */
void *client_memory_map(int fd, size_t bytes);
/* Make all pages of a mapping of whole 2 MiB present, huge ones where the kernel
 * can: those are added to *huge_bytes_p. -KVD_E_NOMEM, -KVD_E_IO. */
int client_memory_fill(void *at, size_t bytes, size_t *huge_bytes_p);
/* For tests: what is called instead of madvise(MADV_COLLAPSE); NULL: that again. */
/* Pages that nobody has made yet are made here: a daemon takes no memory with holes. What
 * cannot be looked at or mapped is left to its answer. -KVD_E_NOMEM. */
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
	atomic_bool suspect; /* the connection ended: ask the pidfd now */
	atomic_bool ended;   /* by the daemon: it takes no more requests from it */
	atomic_bool dead;    /* sticky */
	_Atomic uint64_t asked_ns; /* when the pidfd was last asked */
};

/* Takes pidfd, not page_fd. -KVD_E_PROTO with `why` when the page is not one. */
int client_map_new(int page_fd, size_t bytes, uint32_t slots, int pidfd,
		   struct client_map **map_p, const char **why);
void client_map_unref(struct client_map *map);
enum client_health client_map_health(struct client_map *map);
/* Whether the page's writer gives no sign of life, in words: "" and false where it does,
 * or where that is not known (NULL). */
#define CLIENT_SILENCE_MAX 96
bool client_map_silence(struct client_map *map, char text[CLIENT_SILENCE_MAX]);

/* ---- requests and the connection ----------------------------------------- */

struct client_object;
struct client_request;

/* The typed part of an answer. reply: the parsed line when result is 0. Gives
 * the result as the caller shall see it (-KVD_E_PROTO for a reply without its
 * fields). May run twice: with -KVD_E_NOREPLY at the deadline, and with the late
 * answer (req->late). */
typedef int client_finish(struct client_request *req, int result, const cJSON *reply);

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
	void *out;		      /* of a blocking call; not to be used when late */
	struct client_waiter *waiter;
	void (*on_done)(void *arg, int result, const struct kvd_reply *reply);
	void *arg;
	bool late; /* its caller was told -KVD_E_NOREPLY */
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
	int in_fds[CLIENT_FDS_MAX]; /* arrived, not yet taken */
	unsigned int in_fd_count;
	pid_t sender;	    /* of the last message, by SCM_CREDENTIALS; 0: not known */
	int sender_pidfd;   /* the same, by SCM_PIDFD; -1: the kernel does not tell */
	struct list frames; /* unsent */
	size_t queued_bytes;
	struct list requests; /* unanswered, oldest first */
	struct list ready;    /* answered without the daemon */
	unsigned int pending;
	uint64_t next_deadline_ns; /* none is earlier; 0: no deadline at all */
};

#define KVD_IPC_BYTES 64u /* of a handle of CUDA IPC */

/* one request being made */
struct client_op {
	struct text text; /* `{"id":…,"cmd":…` … without the last brace */
	uint64_t id;
	const int *fds;
	unsigned int fd_count;
	struct client_object *object;
	client_finish *finish;
	void *out;
	bool forced; /* libkvd's own clean-up: beyond the caps */
};

void client_conn_init(struct client_conn *conn);
/* Forget everything; on_done is not called. */
void client_conn_fini(struct kvd_client *client);
/* Close the socket; every pending request ends with -KVD_E_LOST. */
/* by_daemon: it closed; nothing more of ours will be read. */
void client_conn_lost(struct kvd_client *client, bool by_daemon, const char *why);

/* Send what the socket takes. false: the connection is broken (and not yet
 * declared lost: what the daemon said last may still be readable). */
bool client_conn_flush(struct client_conn *conn);
void client_frame_free(struct client_conn *conn, struct client_frame *frame);
/* Unanswered, by id; or NULL. */
struct client_request *client_request_find(struct client_conn *conn, uint64_t id);

void client_op_begin(struct kvd_client *client, struct client_op *op, const char *cmd);
/* Queue it, and wait when call says so. Consumes op. 0 = done or queued. */
int client_op_run(struct kvd_client *client, struct client_op *op,
		  const struct kvd_call *call);
/* The same, blocking, and the answer's line (also of an error answer). */
int client_op_json(struct kvd_client *client, struct client_op *op, int timeout_ms,
		   char **json_p);
/* End without asking the daemon: at once when blocking, else in kvd_poll(). */
int client_op_local(struct kvd_client *client, const struct kvd_call *call);
/* One turn: send, receive, expire, run callbacks; how many requests ended. */
int client_conn_turn(struct kvd_client *client, int timeout_ms);
/* When a call's time ends: 0 is the client's default, negative never (UINT64_MAX). */
uint64_t client_until_ns(const struct kvd_client *client, int timeout_ms);
/* Between two looks at shared memory: what the socket has, then a pause that grows
 * (*pause_ns, 0 at first). */
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
	CLIENT_MAKING, /* asked for, unanswered */
	CLIENT_READY,
	CLIENT_DOUBT,  /* asked for, the caller was told "no answer" */
	CLIENT_FAILED, /* the daemon has no such object */
	CLIENT_CLOSED, /* closed there; the handle is the caller's still */
};

struct client_object {
	struct list link; /* in client->objects[kind] */
	struct kvd_client *client;
	void (*fini)(struct client_object *object);
	uint64_t id;
	enum client_kind kind;
	unsigned int refs;   /* the caller's and one of each request */
	unsigned int serial; /* of the session that made it */
	unsigned int asked;  /* the last session that it was registered again in */
	/* from here on: what reads of thousands look at, close together */
	_Atomic uint32_t phase;
	bool lost; /* FAILED because it could not be made again */
};

void client_object_init(struct kvd_client *client, struct client_object *object,
			enum client_kind kind, void (*fini)(struct client_object *));
void client_object_ref(struct client_object *object);
void client_object_unref(struct client_object *object);
enum client_phase client_object_phase(const struct client_object *object);
void client_object_enter(struct client_object *object, enum client_phase phase);
/* Is it known to the daemon in this session? Else -KVD_E_STATE or _LOST. */
int client_object_usable(struct client_object *object, const char *what);

/* The client_finish of regions, pools and dlists being made. */
int client_object_made(struct client_request *req, int result, const cJSON *reply);
/* The same, of what is registered again: the handle stays on record. */
int client_object_again(struct client_request *req, int result, const cJSON *reply);
/* The client_finish of a closing command: frees the handle if it is in time. */
int client_object_gone(struct client_request *req, int result, const cJSON *reply);
/* The whole closing function of regions, pools and dlists. */
int client_object_close(struct client_object *object, const struct kvd_call *call);
/* Free a handle that the daemon does not have. */
int client_object_forget(struct client_object *object, const struct kvd_call *call);
/* What a call names must be there in this session; -KVD_E_BUSY: it is on its way. */
int client_prepared(struct kvd_client *client, const struct client_object *object,
		    const char *what);
/* The caller's number of an attachment to the daemon's. A blocking call waits for one
 * that is being made again, another gets -KVD_E_BUSY. */
int client_attach_id(struct kvd_client *client, uint64_t *attach_p,
		     const struct kvd_call *call);
/* The same, of what is made again after it. 1: not there yet. */
int client_attach_again_id(struct kvd_client *client, uint64_t number,
			   uint64_t *attach_p);
/* The daemon's id; 0: not registered in this session. */
uint64_t client_object_id(const struct client_object *object);

/* What rooms and xfers have in common: a slot of the status page. */
struct client_slot {
	struct client_object object;
	struct client_map *map;	 /* a reference; NULL only when never asked for */
	uint64_t number;	 /* rooms: the slot's `object` figure */
	uint32_t slot;		 /* valid from CLIENT_READY on, as gen */
	_Atomic uint32_t gen;	 /* rises with every post of a transfer */
	atomic_bool posted;	 /* by kvd_xfer_post() */
	bool numbered;		 /* by us: client_ring_slot() */
	uint32_t before;	 /* numbered: the generation of whoever had the slot */
	int error;		 /* kvd code, valid in CLIENT_FAILED */
	struct kvd_error *fault; /* the same with its text, a room's why; may be NULL */
};

struct kvd_dlist {
	struct client_slot slot; /* used where it is `numbered` */
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
	bool told;  /* and the last word */
};

/* Of an object being made in the current session (client->map is there). */
void client_slot_init(struct client_slot *slot, uint64_t number);
int client_slot_state(const struct client_slot *slot);
/* Of many, as kvd_room_states(); of: what slot_at() finds them in. */
size_t client_slot_states(const struct client_slot *(*slot_at)(const void *of, size_t i),
			  const void *of, size_t count, int *states);
int client_slot_read(const struct client_slot *slot, struct kvd_room_status *status_p);
/* Until state >= `state`, failed or gone; the state or -KVD_E_NOREPLY. */
int client_slot_wait(struct client_slot *slot, int state, int timeout_ms);
/* Take slot and gen from an answer; false: the answer lacks them. */
bool client_slot_attach(struct client_slot *slot, const cJSON *reply);
void client_slot_fini(struct client_slot *slot);

struct kvd_space {
	struct client_object object;
};
struct kvd_hold;
/* The daemon's number of it; 0: not answered yet. */
uint64_t client_hold_id(const struct kvd_hold *hold);

/* ---- the submission ring ----------------------------------------------------- */

struct client_ring;
struct kvd_ring_entry;

/* a released slot; gen 0: nothing of it is under way */
struct client_left {
	uint32_t slot, gen;
};

/* of the session: those that we number */
struct client_slots {
	uint32_t fresh; /* so many were used at least once */
	uint32_t out;	/* given out, or waiting in the queue: at most cap */
	struct client_left *queue;
	uint32_t cap, front, waiting;
};

/* of a payload */
struct client_part {
	const void *data;
	size_t bytes;
};

/* client_enter() for calls that never wait; asks for a ring. */
int client_ring_begin(struct kvd_client *client);
/* Number the object: a slot, its next generation, an id. */
int client_ring_slot(struct kvd_client *client, struct client_slot *slot);
/* The object ends; the slot is used again when the daemon let go of it, too. */
void client_ring_slot_back(struct kvd_client *client, const struct client_slot *slot);
/* Give the entry, by the ring or else the socket; nothing of it has reached the
 * daemon when this fails. */
int client_ring_put(struct kvd_client *client, struct kvd_ring_entry *entry,
		    const struct client_part *parts, size_t count,
		    struct client_object *object);
/* The slot was numbered, and its entry not given. */
void client_ring_slot_unused(struct client_slot *slot);
void client_ring_lost(struct kvd_client *client); /* the session is gone */

/* The closing function of lists and transfers: never waits. */
int client_slot_release(struct client_slot *slot);
/* The daemon has refused it by the socket, for client->error. */
void client_slot_refused(struct client_slot *slot);
/* Why it failed, from the daemon where it has kept its text. Blocks. */
int client_slot_error(const struct client_slot *slot, int timeout_ms,
		      struct kvd_error *error_p);
/* -KVD_E_TOOBIG */
int client_notif_check(struct kvd_client *client, size_t bytes);

/* ---- rooms that are posted (client_room_post.c) -------------------------------- */

/* Does the daemon know the op, and is there a ring to ask by? */
int client_post_begin(struct kvd_client *client, unsigned int op);
/* The entry's payload is views, then text: taken. An OPEN numbers the room. */
int client_post_pages(struct kvd_room *room, struct kvd_ring_entry *entry,
		      const struct kvd_view *views, size_t view_count, struct text *text);
/* The same of any slot; `ids` (NULL: none): entry->n0 of them before the views. */
int client_post_views(struct client_slot *slot, struct kvd_ring_entry *entry,
		      const void *ids, const struct kvd_view *views, size_t view_count,
		      struct text *text);
int client_post_abort(struct kvd_room *room, const char *reason);
int client_post_close(struct kvd_room *room);	    /* frees the handle on success */
int client_post_close_entry(struct kvd_room *room); /* the handle stays */

/* ---- sessions ------------------------------------------------------------ */

enum client_stage {
	CLIENT_DOWN,	    /* no session */
	CLIENT_GREETING,    /* hello is on its way */
	CLIENT_REGISTERING, /* what is on record, too */
	CLIENT_UP,
};

struct client_again {
	bool manual; /* only kvd_reconnect() begins */
	enum client_stage stage;
	bool failed;	    /* this attempt is to end, for `why` */
	unsigned int open;  /* registrations unanswered */
	unsigned int tries; /* since the last session that lasted */
	uint64_t up_ns;
	uint64_t retry_ns;    /* DOWN: when the next attempt is due */
	uint64_t redo_ns;     /* UP: when to make again what failed; 0: nothing did */
	uint64_t until_ns;    /* of an attempt that somebody waits for; 0: nobody */
	uint64_t hello_ns;    /* GREETING: when it was said */
	struct kvd_error why; /* of the last attempt; code 0: none failed */
};

/* A new session, whatever was; blocks. 0, or why there is none. */
int client_session_open(struct kvd_client *client, int timeout_ms);
/* Take the steps that are due, after each turn; never waits. */
void client_session_step(struct kvd_client *client);
/* The connection is gone; from client_conn_lost(). */
void client_session_lost(struct kvd_client *client);
/* When the next step is due without an event; false: none is. */
bool client_session_due(const struct kvd_client *client, uint64_t *due_p);
/* Send the registration of op->object once more. */
int client_session_again(struct client_op *op);
void client_session_answered(struct client_object *object, int result);
/*
 * Every call that needs the session begins here, before it looks at a handle:
 * without one it is -KVD_E_LOST, retryable, never the handle's -KVD_E_STATE. need()
 * takes the steps to a new session that are due, and never waits; check() takes none.
 * begin() is client_enter() and need(); a blocking one finds the end of the
 * connection, connects again if somebody listens, and waits for the registrations,
 * at most the call's time.
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
	unsigned int serial; /* counts sessions; 0: none yet */
	uint64_t next_request;
	struct client_conn conn;
	struct client_again again;
	struct client_map *map;	  /* of the current session */
	struct client_ring *ring; /* the same; NULL: by the socket */
	unsigned int ring_asked;  /* the serial of the session that was asked for one */
	uint64_t ring_ops;	  /* 1 << op of those that its daemon knows */
	unsigned int submits;	  /* entries on the socket: those behind go there, too */
	struct client_slots slots;
	uint64_t notifs_taken; /* in this session */
	uint64_t notifs_waiting;
	cJSON *notifs_kept; /* those: taken, and not told yet; NULL: none ever came */
	struct kvd_daemon_info info;
	struct kvd_error error;
	struct list objects[CLIENT_KINDS];
};

/* -KVD_E_FORKED, -KVD_E_STATE in a callback (blocking calls only), else 0. */
int client_enter(struct kvd_client *client, bool blocks);
bool client_blocks(const struct kvd_call *call);
/* The `call` of those that never wait: nobody is told. */
extern const struct kvd_call client_never_waits;
/* In a new session: register again under the old handle. */
int client_region_again(struct kvd_region *region);
int client_pool_again(struct kvd_pool *pool);
int client_attach_again(struct client_object *object);
int client_dlist_again(struct client_object *object); /* 1: later */

/* Record an error and return -code. */
int client_fail(struct kvd_client *client, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
int client_fail_nomem(struct kvd_client *client);
void client_error_set(struct kvd_error *error, int code, const char *fmt, ...)
	__attribute__((format(printf, 3, 4)));
/* From an error answer; always makes some error. */
void client_error_parse(struct kvd_error *error, const cJSON *reply);
struct kvd_error *client_error_thread(void);

/* Members of an answer; false when absent or of another type. */
bool client_get_u64(const cJSON *reply, const char *name, uint64_t *out_p);
const char *client_get_str(const cJSON *reply, const char *name);

#endif
