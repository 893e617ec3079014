/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Bytes pass through a window that both processes map: a second copy, which stays in a
 * core's cache. Between two memories of one user they stay in the helper process, which
 * has its next request before the last answer is read. Rejected: a thread of this
 * process, which could hang in a page of a file without a server, in a state that no
 * signal ends; process_vm_readv(), which takes a pid, which may be reused.
 *
 * A process that is given up during a write may complete that request later, but only in
 * memory of the user that made it hang. That memory is marked dead.
 */
#include "daemon/memory/vm.h"

#include <assert.h>
#include <errno.h>
#include <poll.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "daemon/gate/open_child.h"
#include "daemon/gate/record.h"
#include "daemon/gate/sandbox.h"
#include "daemon/gate/vm_child.h"
#include "daemon/gate/warden.h"
#include "daemon/memory/memory.h"

#define VM_LOOK_MS 20	/* between checks of `canceled` */
#define VM_LEAVE_MS 200 /* that a canceled one may take */
#define VM_HANG_MS 5000

/* ---- channels ---- */

static void channel_close(struct vm_channel *channel, bool hung)
{
	if (!channel->id)
		return;
	warden_abandon(channel->warden, channel->id, channel->uid, hung);
	close(channel->socket);
	munmap(channel->window, sizeof(*channel->window));
	*channel = (struct vm_channel){.id = 0};
}

void vm_hand_fini(struct vm_hand *hand)
{
	for (size_t i = 0; i < ARRAY_LEN(hand->channels); i++)
		channel_close(&hand->channels[i], false);
}

static int channel_window(struct vm_channel *channel, int *fd_p)
{
	void *map;

	*fd_p = memfd_create("kvd-vm", MFD_CLOEXEC);
	if (*fd_p < 0 || ftruncate(*fd_p, sizeof(*channel->window)) < 0)
		return -1;
	map = mmap(NULL, sizeof(*channel->window), PROT_READ | PROT_WRITE, MAP_SHARED,
		   *fd_p, 0);
	if (map == MAP_FAILED)
		return -1;
	channel->window = map;
	return 0;
}

static int channel_open(struct vm_channel *channel, const struct memory *memory)
{
	struct vm_ask ask = {0};
	cleanup_close int fd = -1;

	if (channel_window(channel, &fd) < 0)
		return -1;
	channel->warden = memory->owner.warden;
	channel->uid = memory->owner.uid;
	if (warden_start(memory->owner.warden, WARDEN_VM, memory->owner.uid, &channel->id,
			 &channel->socket) < 0) {
		munmap(channel->window, sizeof(*channel->window));
		channel->id = 0;
		err_clear();
		errno = EUSERS;
		return -1;
	}
	if (record_send(channel->socket, &ask, sizeof(ask), NULL, 0, &fd, 1) < 0) {
		channel_close(channel, false);
		return -1;
	}
	return 0;
}

static bool is_of(const struct vm_channel *channel, const struct memory *memory)
{
	return channel->id && channel->uid == memory->owner.uid &&
	       channel->warden == memory->owner.warden;
}

/* The one for this memory's user, in the place of the one that was used least lately. */
static struct vm_channel *channel_of(struct vm_hand *hand, const struct memory *memory)
{
	struct vm_channel *oldest = &hand->channels[0];

	hand->uses++;
	for (size_t i = 0; i < ARRAY_LEN(hand->channels); i++) {
		struct vm_channel *channel = &hand->channels[i];

		if (is_of(channel, memory)) {
			channel->used = hand->uses;
			return channel;
		}
		if (channel->used < oldest->used)
			oldest = channel;
	}
	channel_close(oldest, false);
	if (channel_open(oldest, memory) < 0)
		return NULL;
	oldest->used = hand->uses;
	return oldest;
}

/* ---- one request ---- */

/* 0; -1 with errno: the process is given up. */
static int channel_wait(struct vm_channel *channel, const atomic_bool *canceled,
			struct vm_answer *answer)
{
	struct pollfd ready = {.fd = channel->socket, .events = POLLIN};
	uint64_t begun = clock_ns(), left = 0, now;

	for (;;) {
		int n = poll(&ready, 1, VM_LOOK_MS);

		if (n > 0)
			break;
		now = clock_ns();
		if (canceled && atomic_load(canceled) && !left)
			left = now;
		if (left && now - left >= VM_LEAVE_MS * UINT64_C(1000000)) {
			errno = ECANCELED;
			return -1;
		}
		if (now - begun >= VM_HANG_MS * UINT64_C(1000000)) {
			errno = ETIMEDOUT;
			return -1;
		}
	}
	if (recv(channel->socket, answer, sizeof(*answer), MSG_DONTWAIT) ==
	    (ssize_t)sizeof(*answer))
		return 0;
	errno = EPIPE;
	return -1;
}

static uint32_t window_fill(struct vm_window *window, bool reading,
			    const struct iovec *near, const struct iovec *far,
			    unsigned int count)
{
	uint64_t bytes = 0;
	uint32_t rows = 0;

	while (rows < count && rows < VM_WINDOW_ROWS && bytes < VM_WINDOW_BYTES) {
		uint64_t most = VM_WINDOW_BYTES - bytes, len = near[rows].iov_len;

		if (len > most)
			len = most;
		window->rows[rows] = (struct vm_row){
			.address = (uintptr_t)far[rows].iov_base, .bytes = len};
		if (!reading)
			memcpy(window->bytes + bytes, near[rows].iov_base, len);
		bytes += len;
		rows++;
	}
	return rows;
}

static void window_empty(const struct vm_window *window, const struct iovec *near,
			 uint64_t moved)
{
	uint64_t done = 0;

	for (unsigned int i = 0; done < moved; i++) {
		uint64_t len =
			near[i].iov_len < moved - done ? near[i].iov_len : moved - done;

		memcpy(near[i].iov_base, window->bytes + done, len);
		done += len;
	}
}

ssize_t vm_move(struct vm_hand *hand, const struct memory *memory, bool reading,
		const struct iovec *near, const struct iovec *far, unsigned int count,
		const atomic_bool *canceled)
{
	struct vm_channel *channel = channel_of(hand, memory);
	struct vm_ask ask = {.op = reading ? VM_READ : VM_WRITE};
	struct vm_answer answer = {0};
	int no;

	assert(count > 0);
	if (!channel)
		return -1;
	ask.count[0] = window_fill(channel->window, reading, near, far, count);
	/* a write is not left after a cancel: it might go on */
	if (record_send(channel->socket, &ask, sizeof(ask), NULL, 0, &memory->mem_fd, 1) <
		    0 ||
	    channel_wait(channel, reading ? canceled : NULL, &answer) < 0) {
		no = errno;
		channel_close(channel, no == ETIMEDOUT || no == ECANCELED);
		errno = no;
		return -1;
	}
	if (answer.moved > VM_WINDOW_BYTES || (answer.moved == 0 && !answer.error))
		answer = (struct vm_answer){.error = EPIPE};
	if (answer.moved && reading)
		window_empty(channel->window, near, answer.moved);
	if (answer.moved)
		return (ssize_t)answer.moved;
	errno = answer.error;
	return -1;
}

/* ---- pairs ---- */

bool vm_can_pair(const struct memory *src, const struct memory *dst)
{
	return src && dst && src->kind == MEMORY_VM && dst->kind == MEMORY_VM &&
	       src->owner.uid == dst->owner.uid && src->owner.warden == dst->owner.warden;
}

struct vm_pair *vm_pair_of(struct vm_hand *hand, const struct memory *memory)
{
	struct vm_channel *channel = channel_of(hand, memory);

	if (!channel)
		return NULL;
	assert(channel->pairs < VM_PAIRS);
	return &channel->window->pairs[channel->next_pair];
}

int vm_pair_ask(struct vm_hand *hand, const struct memory *src, const struct memory *dst,
		const uint32_t count[2], uint64_t bytes)
{
	struct vm_channel *channel = channel_of(hand, src);
	const int fds[2] = {src->mem_fd, dst->mem_fd};
	struct vm_ask ask = {VM_PAIR, channel->next_pair, {count[0], count[1]}};
	int no;

	atomic_store(&channel->window->pairs[ask.pair].stage, VM_READING);
	if (record_send(channel->socket, &ask, sizeof(ask), NULL, 0, fds, 2) < 0) {
		no = errno;
		if (!channel->pairs)
			channel_close(channel, false);
		errno = no;
		return -1;
	}
	channel->pair_bytes[ask.pair] = bytes;
	channel->next_pair = (channel->next_pair + 1) % VM_PAIRS;
	channel->pairs++;
	return 0;
}

unsigned int vm_pairs_open(const struct vm_hand *hand, const struct memory *memory)
{
	for (size_t i = 0; i < ARRAY_LEN(hand->channels); i++)
		if (is_of(&hand->channels[i], memory))
			return hand->channels[i].pairs;
	return 0;
}

/* Newest first, so that none starts. Is the oldest being written? */
static bool pairs_give_up(struct vm_channel *channel)
{
	uint32_t stage = VM_READING;

	for (unsigned int i = 1; i <= channel->pairs; i++)
		stage = atomic_exchange(
			&channel->window
				 ->pairs[(channel->next_pair + VM_PAIRS - i) % VM_PAIRS]
				 .stage,
			VM_GIVEN_UP);
	return stage == VM_WRITING;
}

int vm_pair_end(struct vm_hand *hand, const struct memory *src,
		const atomic_bool *canceled, bool *writing_p)
{
	struct vm_channel *channel = channel_of(hand, src);
	uint32_t n = (channel->next_pair + VM_PAIRS - channel->pairs) % VM_PAIRS;
	struct vm_answer answer = {0};
	int no;

	assert(channel->pairs > 0);
	*writing_p = false;
	no = channel_wait(channel, canceled, &answer) < 0 ? errno : 0;
	if (no)
		*writing_p = pairs_give_up(channel);
	if (no == ECANCELED && *writing_p) /* it might go on */
		no = channel_wait(channel, NULL, &answer) < 0 ? errno : 0;
	if (no) {
		channel_close(channel, no == ETIMEDOUT || no == ECANCELED);
		errno = no;
		return -1;
	}
	if (atomic_load(&channel->window->pairs[n].stage) == VM_WRITING)
		*writing_p = true;
	channel->pairs--;
	if (!answer.error && answer.moved != channel->pair_bytes[n])
		answer.error = EPIPE;
	errno = answer.error;
	return answer.error ? -1 : 0;
}

/* ---- opening ---- */

/* A line "Uid:\treal effective saved file" of /proc/PID/status. */
static bool is_all_of(int fd, uid_t uid)
{
	char text[2048], *at;
	struct stat st;
	ssize_t n = read(fd, text, sizeof(text) - 1);

	/* files of a process that may not be dumped are root's */
	if (n <= 0 || fstat(fd, &st) < 0 || st.st_uid != uid)
		return false;
	text[n] = '\0';
	at = strstr(text, "\nUid:");
	if (!at)
		return false;
	at += strlen("\nUid:");
	for (int i = 0; i < 4; i++)
		if (strtoul(at, &at, 10) != uid)
			return false;
	return true;
}

static int open_failed(pid_t pid, int no)
{
	return err_raise(no == EACCES || no == EPERM ? ERR_PERM : ERR_IMPORT,
			 "kind vm: /proc/%d/mem: %s: the client must pass an fd of its "
			 "/proc/self/mem, as libkvd does",
			 (int)pid, strerror(no));
}

static int open_here(pid_t pid, int mode, int fds[OPEN_FDS])
{
	int no = open_process(pid, mode, fds);

	return no ? open_failed(pid, no) : 0;
}

/* By a process for this alone. */
static int open_elsewhere(const struct memory_owner *owner, int mode, int fds[OPEN_FDS])
{
	struct open_ask ask = {.pid = owner->pid, .mode = mode};
	struct open_answer answer = {.error = EPIPE};
	struct pollfd ready = {.events = POLLIN};
	unsigned int count = 0;
	int r, no = EPIPE;
	uint64_t id;

	r = warden_start(owner->warden, WARDEN_OPEN, owner->uid, &id, &ready.fd);
	if (r < 0)
		return err_pass(r);
	if (record_send(ready.fd, &ask, sizeof(ask), NULL, 0, NULL, 0) == sizeof(ask) &&
	    poll(&ready, 1, VM_HANG_MS) == 0)
		no = ETIMEDOUT;
	else if (record_receive_now(ready.fd, &answer, sizeof(answer), fds, OPEN_FDS,
				    &count) == sizeof(answer))
		no = answer.error ? answer.error : count == OPEN_FDS ? 0 : EMFILE;
	warden_abandon(owner->warden, id, owner->uid, no == ETIMEDOUT);
	close(ready.fd);
	return no ? open_failed(owner->pid, no) : 0;
}

int vm_open(const struct memory_owner *owner, int mode, int *fd_p)
{
	struct pollfd gone = {.fd = owner->pidfd, .events = POLLIN};
	int fds[OPEN_FDS] = {-1, -1};
	int r = sandbox_hides_processes() ? open_elsewhere(owner, mode, fds)
					  : open_here(owner->pid, mode, fds);

	/* after the open: the check applies to the process that was opened */
	if (r == 0 && (!is_all_of(fds[OPEN_STATUS], owner->uid) || poll(&gone, 1, 0) > 0))
		r = err_raise(
			ERR_PERM,
			"kind vm: process %d has a user other than %u, or may not be "
			"dumped",
			(int)owner->pid, owner->uid);
	if (r == 0)
		*fd_p = mem_steal_fd(&fds[OPEN_MEM]);
	mem_closep(&fds[OPEN_MEM]);
	mem_closep(&fds[OPEN_STATUS]);
	return err_pass(r);
}
