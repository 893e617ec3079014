/* SPDX-License-Identifier: Apache-2.0 */
/*
 * ext: kvd._kvd, the C part of the Python package.
 *
 *   ext.c         the module, errors as exceptions, fork
 *   ext_client.c  Client: one connection, many threads
 *   ext_call.c    calls with an answer of the daemon; handles and closing them
 *   ext_memory.c  regions, pools, layouts, adopted memory
 *   ext_room.c    rooms
 *   ext_lists.c   attachments, descriptor lists
 *   ext_xfer.c    transfers, notifications
 *   ext_chunk.c   spaces, holds, puts and fetches of chunks
 *   ext_attend.c  query rows that attend to chunks in place
 *   ext_cost.c    route, fetch or local
 *   ext_math.c    attention in this process, by the daemon's kernels
 *   paged.c       batches of requests as calls of the kernels (no Python in it)
 *   ext_rows.c    descriptor rows: check, compress, index lists (no Python in it)
 *
 * One lock per client. No thread waits for it with the GIL held, and no Python code runs
 * under it: work for Python (callbacks, references to drop) is queued there and done
 * after it (client_unlock()). Finalisers queue what they close, too, so neither the
 * collector nor the end of a thread ever waits.
 *
 * A handle of libkvd is read with the GIL held, and used before the GIL is released, or
 * under the lock and before that is released: only a closing removes a handle, and that
 * needs both (struct handle). A handle that was read earlier is read again.
 *
 * Only the stable ABI of Python 3.9 is used.
 */
#ifndef KVD_PYTHON_EXT_H
#define KVD_PYTHON_EXT_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <structmember.h> /* T_ULONGLONG … */

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "daemon/base/list.h"
#include "daemon/base/mem.h"
#include "lib/kvd.h"

/* ---- ext.c ----------------------------------------------------------------- */

/* (number, code, retryable, scope, message), or None for no error. */
PyObject *ext_error(const struct kvd_error *error);
/* Raise kvd's exception for `error`; returns NULL. */
PyObject *ext_raise(const struct kvd_error *error);
PyObject *ext_raise_code(int code, const char *fmt, ...)
	__attribute__((format(printf, 2, 3)));
/* Add a heap type to the module; NULL with an exception. `name` is "kvd._kvd.Name". */
PyTypeObject *ext_type(PyObject *module, const char *name, size_t bytes,
		       PyType_Slot *slots);
/* Counts forks of this process: objects with another count belong to the parent. */
unsigned int ext_forks(void);
/* "O&" of PyArg_ParseTuple(): seconds, to an int of milliseconds; None: 0, the client's
 * default. Returns 1, or 0 with an exception. */
int ext_timeout(PyObject *seconds, void *ms_p);

struct client;
/* The first members of each object that belongs to a client. */
struct owned {
	PyObject_HEAD struct client *client;
};
/* A new object of the type, with zeros but for its client; NULL with an exception. */
void *ext_new(PyTypeObject *type, struct client *client);
/* The end of a finaliser of such an object. */
void ext_free(PyObject *self);

int ext_client_init(PyObject *module);
int ext_memory_init(PyObject *module);
int ext_room_init(PyObject *module);
int ext_lists_init(PyObject *module);
int ext_xfer_init(PyObject *module);
int ext_chunk_init(PyObject *module);
int ext_attend_init(PyObject *module);
int ext_cost_init(PyObject *module);
int ext_math_init(PyObject *module);

/* ---- ext_client.c ------------------------------------------------------------ */

struct handle;

/* A request that a thread waits for, or whose end is reported to a callable. */
struct op {
	struct list link; /* in client->ops, until it is done */
	struct op *next;  /* in client->told */
	bool done, abandoned;
	bool want_json;
	int result;
	struct kvd_error error;
	char *json;
	struct client *client;
	PyObject *callback; /* called with the answer's text, the exception, or both */
	PyObject *keep;	    /* alive until then */
	PyObject *drop;	    /* what the handle kept alive, once it is closed */
	void (*end)(struct op *op); /* under the lock, without the GIL */
	void *arg;
	void *handle;	 /* of libkvd, which is being closed */
	struct op *also; /* closings of the same handle, which end with this one */
};

/* Left by a finaliser, to be closed by the next thread that has the lock. */
struct closing {
	struct closing *next;
	/* 0: requested, call->on_done reports the end; 1: closed; negative: not now */
	int (*close)(void *handle, const struct kvd_call *call);
	void *handle;
	PyObject *keep; /* memory that must stay until it is closed */
	bool asked;	/* closing is in progress */
	bool again;	/* it was refused and is retried */
	bool closed;
};

struct client {
	PyObject_HEAD struct kvd_client *kvd; /* NULL: closed */
	unsigned int forks;
	int timeout_ms; /* of a call without a timeout */
	pthread_mutex_t lock;
	pthread_cond_t turned;
	bool polling; /* one of the waiting threads is in poll() */
	uint64_t polled_ns, tended_ns;
	struct list ops; /* not done yet */
	struct op *told; /* callbacks due */
	struct op **told_end;
	_Atomic(struct closing *) left; /* pushed by finalisers, without the lock */
	struct closing *closings;	/* under the lock */
	struct closing *closed_list;	/* closed: references to drop */
};

extern PyTypeObject *client_type;

/* With the GIL; false: an exception (closed, forked). */
bool client_lock(struct client *c);
/* Without releasing the GIL: false when another thread has the lock (no exception). */
bool client_trylock(struct client *c);
void client_look(struct client *c);
void client_unlock(struct client *c);
/* Unlock, and raise the client's last error as an exception. Returns NULL. */
PyObject *client_raise(struct client *c);
/* Unlock after a call of libkvd. false: r is negative, and its error was raised. */
bool client_end(struct client *c, int r);
/* Close `handle` later; never waits, never raises. Takes the reference keep. */
void client_close_later(struct client *c, int (*close)(void *, const struct kvd_call *),
			void *handle, PyObject *keep);
/* Wait for events, at most 50 ms, and handle them; with the lock and the GIL, which other
 * threads have meanwhile. */
void client_step(struct client *c);
/* The same, and handlers of signals, which may use the client; false: an exception. */
bool client_turns(struct client *c);
/* Wait until the socket has sent all, at most a second; with the lock and the GIL. */
void client_flush(struct client *c);
/* One turn if the last one is long ago (or `now`); with the lock. */
void client_turn(struct client *c, bool now);

/* ---- ext_call.c -------------------------------------------------------------- */

/* The first member of each object with a handle of libkvd. */
struct handle {
	PyObject_HEAD struct client *client;
	_Atomic(void *) kvd; /* NULL: not created, closed, or being closed */
	PyObject *keep;	     /* alive until the daemon has closed it */
	struct op *closing;  /* under the lock; NULL: none is in progress */
	const char *noun;    /* of messages */
	uint64_t number;     /* 0: not in messages */
};

struct handle *handle_new(PyTypeObject *type, struct client *c, const char *noun,
			  PyObject *keep);
/* Store what libkvd made in a call that ended with r; the object closes it at its own
 * end. NULL: r is negative, and the object was freed. */
PyObject *handle_made(struct handle *h, void *made, int r);
/* With the GIL, for a use before it is released. */
static inline bool handle_is_open(const struct handle *h)
{
	return h->kvd && h->client->kvd;
}
/* false: StateError. */
bool handle_usable(const struct handle *h);
/* The client's lock, with the handle open under it; false: an exception. */
bool handle_lock(const struct handle *h);
typedef int handle_shut(void *handle, const struct kvd_call *call);
/*
 * A type's closing(timeout=None, on_done=None). While that is in progress all other calls
 * find the handle closed; when the daemon refuses, it is open again. A second closing
 * ends as the first one does. `post` as in struct run.
 */
PyObject *handle_close(PyObject *self, PyObject *args, PyObject *kwargs,
		       handle_shut *shut, bool post);
/* Body of a type's finaliser. */
void handle_dealloc(PyObject *self, handle_shut *shut);

typedef int op_start(void *ctx, const struct kvd_call *call);

/* A handle that a call names: read under the lock each time the call is started. */
struct use {
	const struct handle *of;
	void *to; /* a pointer in the arguments of libkvd, which becomes the handle */
};

struct run {
	struct client *client;
	op_start *start; /* under the lock, with the GIL; 1: it is done */
	void *ctx;
	const struct use *uses;
	size_t use_count;
	int timeout_ms;
	PyObject *told; /* called at its end; NULL, None: the thread waits */
	bool post;	/* has no end: the daemon sends no answer */
};
/*
 * Start a request under the lock, and wait for its end, the GIL and the lock being free
 * meanwhile; 0, or negative with an exception. *json_p (may be NULL) is the answer's
 * line (mem_free()).
 */
int client_run(const struct run *run, char **json_p);
/* A request whose end is reported to `end`, without a waiting thread. `keep` is kept
 * alive until then. NULL: no memory. *call_p is for the request; op_cancel() if it was
 * not queued. */
struct op *op_new(struct client *c, PyObject *keep, void (*end)(struct op *op), void *arg,
		  struct kvd_call *call_p);
void op_cancel(struct op *op);
/* Call the callable, with the GIL and without the lock, and free it. */
void op_tell(struct op *op);
/* The client is closed: none of its requests will be answered. Under the lock. */
void ops_end(struct client *c);

/* ---- ext_memory.c ------------------------------------------------------------ */

struct region {
	struct handle h; /* keep: the owner of its bytes */
	uint64_t address, bytes;
	const char *kind;
};
extern PyTypeObject *region_type, *pool_type; /* a pool is a struct handle */
/* Of this client, and registered; false: ValueError that names argument[index]. */
bool region_usable(const struct region *region, const struct client *client,
		   const char *argument, Py_ssize_t index);
/* The same of a pool. */
bool pool_usable(PyObject *pool, const struct client *client);

/* ---- ext_room.c -------------------------------------------------------------- */

/* Parse the tuples of kvd/rooms.py, which own the memory that the structs point to.
 * Negative: an exception; the views are freed in any case. */
struct ext_views {
	struct kvd_view *at;
	size_t count;
};
int ext_views_parse(PyObject *tuple, struct ext_views *views);
void ext_views_fini(struct ext_views *views);
/* *use_p: of its region, `of` NULL if it has none; of the call that is given *wait. */
int ext_wait_parse(const struct client *client, PyObject *tuple, struct kvd_wait *wait,
		   struct use *use_p);
/* *names_p: mem_free() */
int ext_names_parse(PyObject *tuple, const char ***names_p, size_t *count_p);
void ext_on_nothing(void *arg, int result, const struct kvd_reply *reply);

/* ---- ext_attend.c ------------------------------------------------------------ */

struct kvd_rope;
/* None: dims 0. False with an exception. */
bool ext_rope_parse(PyObject *rope, struct kvd_rope *out);

/* ---- ext_chunk.c ------------------------------------------------------------- */

/* From a Hold of this client that is open; NULL with an exception. */
const struct handle *ext_hold_of(PyObject *hold, const struct client *client);

/* ---- ext_rows.c ---------------------------------------------------------------- */

/* a registered region, as Python packs it */
struct span {
	uint64_t address, bytes, device;
};

struct rows {
	struct kvd_desc *entries;
	uint64_t *first; /* row number of each entry's first row; count + 1 */
	size_t count;
	uint64_t rows;
	uint64_t bytes; /* of every row; 0: they differ */
	size_t empty;	/* entries without bytes: legal, and never moved */
};

enum rows_fault { ROWS_OK, ROWS_NOMEM, ROWS_RANGE, ROWS_EMPTY, ROWS_STRIDE };

/* `columns` 3: (address, bytes, device), 5: (…, stride, count), u64 each, consecutive
 * rows. Every row must lie in one span of its device. Runs of equal distance in one span
 * become one entry. *at_p: the invalid row. */
enum rows_fault rows_make(struct rows *rows, const uint64_t *table, size_t count,
			  unsigned int columns, const struct span *spans,
			  size_t span_count, size_t *at_p);
void rows_fini(struct rows *rows);
/* The entries for a daemon, which accepts none without bytes: such a one is replaced by
 * another, because its number must be kept. The caller frees it; NULL: no memory. At
 * least one entry must have bytes. */
struct kvd_desc *rows_filled(const struct rows *rows);
/* Remove pairs of rows without bytes from two index lists; returns the rest's length. */
size_t rows_drop_empty(const struct rows *a, uint32_t *ai, uint32_t *bi, size_t count);
/* Convert one index list. kind: 'i' or 'u', size 1 2 4 8, stride in bytes. Returns the
 * first index outside [0, limit), or SIZE_MAX. */
size_t rows_index(uint32_t *out, const void *in, size_t count, ptrdiff_t stride,
		  char kind, unsigned int size, uint64_t limit);
/* Compare lengths row by row; the first difference, or SIZE_MAX. index NULL: all rows. */
size_t rows_lengths(const struct rows *a, const uint32_t *ai, const struct rows *b,
		    const uint32_t *bi, size_t count, uint64_t *bytes_p);
/* Number of pieces after merging those that are adjacent on both sides. */
size_t rows_merged(const struct rows *a, const uint32_t *ai, const struct rows *b,
		   const uint32_t *bi, size_t count);

/* ---- ext_lists.c --------------------------------------------------------------- */

enum { PENDING = 0, READY = 1, REFUSED = -1 };

struct attach {
	PyObject_HEAD struct client *client;
	uint64_t number;
	int state;
	int ms;	    /* of refresh() */
	bool stale; /* query again after the answer */
	struct kvd_error error;
};

struct dlist {
	PyObject_HEAD struct client *client;
	struct attach *attach; /* NULL: own memory */
	struct rows rows;
	struct kvd_dlist *kvd;
	bool answered; /* usable only after the daemon's answer */
	bool busy;     /* PENDING: its session ended with a daemon and was not restored */
	unsigned int serial; /* of its attachment */
	int state;
	struct kvd_error error; /* of REFUSED */
};

extern PyTypeObject *attach_type, *dlist_type;

/* Whether transfers may name it; sends it to the daemon when that is possible. With the
 * lock. */
int dlist_go(struct dlist *d);
/* For client_close_later(). */
int dlist_shut(void *handle, const struct kvd_call *call);

#endif
