/* SPDX-License-Identifier: Apache-2.0 */
/*
 * vm: private memory of other processes, read and written by helper processes that may
 * hang (gate/vm_child.h): one for each thread of ours and each user whose memory it
 * moves. A thread waits for its process with a deadline and gives it up when it is
 * canceled.
 */
#ifndef KVD_MEMORY_VM_H
#define KVD_MEMORY_VM_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/types.h>
#include <sys/uio.h>

struct memory;
struct memory_owner;
struct warden;

#define VM_USERS 4u /* users with processes kept by a thread */

struct vm_channel {
	struct warden *warden;
	uid_t uid;
	uint64_t id; /* of the process, the warden's; 0: none */
	int socket;
	struct vm_window *window;
	unsigned int pairs; /* asked for, not answered */
	unsigned int next_pair;
	uint64_t pair_bytes[2]; /* VM_PAIRS */
	uint64_t used;		/* the hand's count at its last use */
};

/* A thread's own. Zeroed is empty. */
struct vm_hand {
	struct vm_channel channels[VM_USERS];
	uint64_t uses;
};
void vm_hand_fini(struct vm_hand *hand);

/*
 * The first of `count` stretches, or more: `far` are addresses in the owner's process,
 * `near` ours, with the same lengths. The bytes moved, or -1 with errno: ESRCH (its
 * address space has ended), EFAULT, ECANCELED (*canceled was set), ETIMEDOUT (it hangs),
 * EUSERS (too many processes of this user hang), ENOMEM.
 */
ssize_t vm_move(struct vm_hand *hand, const struct memory *memory, bool reading,
		const struct iovec *near, const struct iovec *far, unsigned int count,
		const atomic_bool *canceled);

/*
 * Between two memories of one user's processes, in one of them: no bytes pass through
 * ours. Rows are written to vm_pair_of(), then asked for: up to VM_PAIRS, so that the
 * process has work while its answer is read. They are answered in order.
 */
struct vm_pair;
bool vm_can_pair(const struct memory *src, const struct memory *dst);
/* The pair to be asked for next; NULL with errno, as vm_move(). */
struct vm_pair *vm_pair_of(struct vm_hand *hand, const struct memory *memory);
/* `count` of rows read and written, of so many bytes each. 0, or -1 with errno. */
int vm_pair_ask(struct vm_hand *hand, const struct memory *src, const struct memory *dst,
		const uint32_t count[2], uint64_t bytes);
/* The oldest. 0, or -1 with errno: *writing_p tells which side's. A cancel ends it while
 * it reads: what is being written is waited for. */
int vm_pair_end(struct vm_hand *hand, const struct memory *src,
		const atomic_bool *canceled, bool *writing_p);
/* How many can be ended: none of a process that was given up, which starts no more. */
unsigned int vm_pairs_open(const struct vm_hand *hand, const struct memory *memory);

/*
 * The memory of a process that passed no fd: opened by its number (in the sandbox by
 * another process, gate/open_child.h), and kept only if the process is then alive, by its
 * pidfd, and belongs entirely to its user: a program executed with other rights does not.
 * `mode`: O_RDWR or O_RDONLY. Waits. ERR_PERM, ERR_IMPORT, ERR_LIMIT.
 */
int vm_open(const struct memory_owner *owner, int mode, int *fd_p);

#endif
