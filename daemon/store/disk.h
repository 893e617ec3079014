/* SPDX-License-Identifier: Apache-2.0 */
/*
 * disk: the files of one directory, without blocking.
 *
 * There are slab files, named by a number and by the size of their slots, which are read
 * and written in place; and named files, small, which are read and written whole. An op
 * is embedded in its owner and submitted from the loop; `done` is called on the loop. The
 * backend is threads, or a test's simulated disk.
 *
 * Durability. MAKE, REMOVE, NAMED_WRITE and NAMED_REMOVE that complete without a fault
 * survive a loss of power. An incomplete one has happened or has not, never in part: a
 * slab file has all of its bytes, a named file its old content or its new. After a fault
 * either is possible, but MAKE undoes its work. Of a WRITE, each 512 bytes may be old or
 * new, until a SYNC that was submitted after its `done` completes. If a SYNC fails,
 * everything written since the last good SYNC counts as lost: the kernel reports a lost
 * page once.
 *
 * Order. There is none: to order two ops, submit the second in the first one's `done`.
 * Reads are scheduled before writes, in pieces of DISK_PIECE_BYTES; ops of each kind take
 * turns. A REMOVE of its file does not delay an op in progress.
 *
 * Only the loop's thread calls, except for the hooks.
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

struct disk_args {
	const char *path; /* of an existing directory; access rights are the caller's */
	bool cached; /* uses the page cache even if its file system supports O_DIRECT */
	uint64_t stop_ns; /* limit of the wait in disk_free(); 0: DISK_STOP_NS */
	/* Once, from the loop, unless it is closed before. `why` NULL: it is open.
	 * Otherwise free it, but not from here. ERR_BUSY: another daemon uses the
	 * directory. */
	void (*on_open)(void *arg, struct disk *disk, const struct err *why);
	void *arg;
};
/*
 * Starts to open. The directory is opened on a thread. It gets a file `lock`; files that
 * a crash left incomplete are removed. ERR_NOMEM, ERR_LIMIT.
 */
int disk_open(struct loop *loop, const struct disk_args *args, struct disk **disk_p);
/* New ops end with ERR_STATE. Waiting ones end with ERR_CANCELED; those in progress end
 * when the device has completed their pieces, with ERR_CANCELED or their own result.
 * Idempotent, never blocks. */
void disk_close(struct disk *disk);
/* Closed, all `done`s were called and all threads have ended: disk_free() does not wait.
 */
bool disk_drained(const struct disk *disk);
/*
 * Closes, and waits until it is drained, at most stop_ns; calls `done`s. Not from a
 * callback of the disk's. NULL is fine. Outcome DISK_ABANDONED: the device, or a hook,
 * did not return. Then ops whose `done` was not called stay owned by the disk, with their
 * memory, which may be written later: the process must exit.
 */
int disk_free(struct disk *disk);

/* ---- ops ---- */

enum disk_what {
	DISK_LIST,   /* the files: *list */
	DISK_MAKE,   /* a slab file of `bytes`, all of them reserved, read as zeros */
	DISK_REMOVE, /* a slab file */
	DISK_READ,   /* iov, from `offset` on */
	DISK_WRITE,  /* iov, to `offset`; inside the file */
	DISK_SYNC,   /* all earlier writes of the file */
	DISK_NAMED_WRITE, /* the file's content becomes iov[0] */
	DISK_NAMED_READ,  /* all of it into iov[0]; `moved`: its size */
	DISK_NAMED_REMOVE,
	DISK_SPACE, /* `moved`: free bytes of the file system for this process */
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
	 * Hooks, or NULL. They run on a thread of the disk's, so they must not use the
	 * loop or rooms, and they own all data they use. `before` runs when the op is
	 * started (a WRITE's sums), `after` when it has ended without a fault (a READ's
	 * sums). They may set `result` to the value of err_raise().
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

bool disk_direct(const struct disk *disk); /* open: past the page cache (O_DIRECT) */

struct disk_figures {
	uint64_t reads, writes; /* READ and WRITE that ended without a fault */
	uint64_t read_bytes, written_bytes;
	uint64_t errors;	/* ops of all kinds that ended with ERR_IO */
	uint64_t ended;		/* ops of all kinds */
	unsigned int in_flight; /* ops that are not done */
};
void disk_figures(const struct disk *disk, struct disk_figures *figures_p);

#endif
