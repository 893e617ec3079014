/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk: the files of one directory, without waiting for them.
 *
 * There are slab files, named by a number and by the size of their slots, which are read
 * and written in place; and named files, small, which are read and written whole. What is
 * to be done is an op: embedded in its owner, submitted from the loop, its `done` comes
 * on the loop. Behind the door is io_uring, threads, or a test's simulated disk.
 *
 * What lasts. MAKE, REMOVE, NAMED_WRITE and NAMED_REMOVE that are done without a fault
 * outlast a loss of power. One that is not done has happened or has not, never in part:
 * a slab file has all of its bytes, a named file its old content or its new. With a fault
 * either may be so; but MAKE takes back what it has made. Of a WRITE, each 512 bytes may
 * be old or new, until a SYNC that was submitted behind its `done` is done. What was
 * written since the last SYNC without a fault counts as lost when one has a fault: the
 * kernel tells of a lost page once.
 *
 * Order. There is none: who wants one thing behind another submits it in the other's
 * `done`. Reads go before writes, in pieces of DISK_PIECE_BYTES; of each kind ops take
 * turns. An op that has begun is not held up by a REMOVE of its file.
 *
 * The loop's thread, but for the hooks.
 */
#ifndef KVD_STORE_DISK_H
#define KVD_STORE_DISK_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/uio.h>

#include "daemon/base/err.h"
#include "daemon/base/list.h"

struct disk;
struct disk_fd;
struct loop;

#define DISK_ALIGN 4096u /* of offsets, lengths and addresses in slab files */
#define DISK_PIECE_BYTES (UINT64_C(1) << 20)
#define DISK_NAME_MAX 80u /* bytes: letters, digits, '-', '_' */
#define DISK_NAMED_BYTES_MAX (UINT64_C(1) << 20)
#define DISK_STOP_NS UINT64_C(2000000000)

/* Outcome of disk_free(). */
#define DISK_ABANDONED 1

/* ---- life ---- */

enum disk_way {
	DISK_BEST, /* io_uring; threads where the kernel or its container bars that */
	DISK_URING,
	DISK_THREADS,
};

struct disk_args {
	const char *path; /* of a directory that is there; whose, is its user's matter */
	enum disk_way way;
	bool cached;	  /* by the page cache, also where its file system can without */
	uint64_t stop_ns; /* disk_free() waits no longer; 0: DISK_STOP_NS */
	/* Once, from the loop, unless it is closed before. `why` NULL: it is open. Else
	 * it is to be freed; not from here. ERR_BUSY: another daemon uses the directory.
	 */
	void (*on_open)(void *arg, struct disk *disk, const struct err *why);
	void *arg;
};
/*
 * Begins to open. Makes the threads, and the ring of io_uring with what it may do: before
 * the sandbox is entered (later there is no ring any more, and DISK_BEST takes threads).
 * The directory is opened on a thread. It gets a file `lock`, and loses what a crash left
 * half made. ERR_NOMEM, ERR_LIMIT; DISK_URING: ERR_REQUIRE, why there is none.
 */
int disk_open(struct loop *loop, const struct disk_args *args, struct disk **disk_p);
/* No new ops: their `done` brings ERR_STATE. Those that wait end with ERR_CANCELED, those
 * under way when what the device has of them is back, then with ERR_CANCELED or as
 * they would have. Idempotent, never blocks. */
void disk_close(struct disk *disk);
/* Closed, all `done`s were called and all threads have ended: disk_free() will not wait.
 */
bool disk_drained(const struct disk *disk);
/*
 * Closes, and waits until it is drained, at most stop_ns; calls `done`s. Not from a
 * callback of the disk's. NULL is fine. Outcome DISK_ABANDONED: the device, or a hook,
 * did not come back. Then ops whose `done` was not called stay the disk's for good, with
 * their memory, which may still be written: the process is to end.
 */
int disk_free(struct disk *disk);

/* ---- ops ---- */

enum disk_what {
	DISK_LIST,   /* what there is: *list */
	DISK_MAKE,   /* a slab file of `bytes`, all of them reserved, read as zeros */
	DISK_REMOVE, /* a slab file */
	DISK_READ,   /* iov, from `offset` on */
	DISK_WRITE,  /* iov, to `offset`; inside the file */
	DISK_SYNC,   /* what was written to the file */
	DISK_NAMED_WRITE, /* the file's content becomes iov[0] */
	DISK_NAMED_READ,  /* all of it into iov[0]; `moved`: how much that is */
	DISK_NAMED_REMOVE,
	DISK_SPACE, /* `moved`: bytes that the file system has left for this process */
	DISK_WHATS,
};

struct disk_file {
	uint64_t slot_bytes;
	uint32_t number;
};

struct disk_slab {
	struct disk_file file;
	uint64_t bytes;
};
struct disk_named {
	char name[DISK_NAME_MAX + 1];
	uint64_t bytes;
};
struct disk_list { /* in order of numbers, of names */
	struct disk_slab *slabs;
	struct disk_named *named;
	size_t slab_count, named_count;
};
void disk_list_fini(struct disk_list *list); /* a zeroed one is fine */

struct disk_op {
	struct list link; /* the disk's, from submit to done */
	enum disk_what what;
	struct disk_file file; /* MAKE, REMOVE, READ, WRITE, SYNC */
	const char *name;      /* NAMED_… */
	uint64_t offset;
	uint64_t bytes; /* MAKE */
	struct iovec iov[2];
	struct disk_list *list; /* LIST: filled or empty; to be disk_list_fini()ed */

	/*
	 * Hooks, or NULL; on a thread of the disk's, hence no loop, no room, and what
	 * they touch is the op's. `before` runs when the op's turn has come (a WRITE's
	 * sums), `after` when it has ended without a fault (a READ's sums). They may set
	 * `result` to what err_raise() gave them.
	 */
	void (*before)(struct disk_op *op);
	void (*after)(struct disk_op *op);
	void (*done)(struct disk_op *op); /* may submit or free it */

	/*
	 * 0, or negative with `err`. ERR_IO: the device's fault, with file, offset and
	 * the system's words, or a file that ends before what is read. ERR_LIMIT: no
	 * space left, a quota, too many open files. ERR_NOTFOUND, ERR_EXIST: a file.
	 * ERR_TOOBIG: named content that is larger than iov[0]. ERR_STATE: not open;
	 * ERR_CANCELED: closed.
	 */
	int result;
	struct err err;
	uint64_t moved; /* bytes, of READ, WRITE, NAMED_… and SPACE */

	struct { /* the disk's own */
		uint64_t cut;
		unsigned int flying, turn;
		bool begun;
		struct disk_fd *held;
		void *file;
	} own;
};

/* Never fails, never blocks. The op, its name and its memory stay until `done`. */
void disk_submit(struct disk *disk, struct disk_op *op);
bool disk_name_ok(const char *name);

/* ---- records ---- */

const char *disk_kind(const struct disk *disk); /* "io_uring", "threads", "simulated" */
bool disk_direct(const struct disk *disk);	/* open: past the page cache (O_DIRECT) */

struct disk_figures {
	uint64_t reads, writes; /* READ and WRITE that ended without a fault */
	uint64_t read_bytes, written_bytes;
	uint64_t errors;	/* ops of all kinds that ended with ERR_IO */
	uint64_t ended;		/* ops of all kinds */
	unsigned int in_flight; /* ops that are not done */
};
void disk_figures(const struct disk *disk, struct disk_figures *figures_p);

#endif
