/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Tokens are bytes 0 … count-1 of a file, held by an exclusive OFD lock. A daemon without
 * a token signals this by a shared lock on one byte well behind them: a daemon that holds
 * tokens for long queries that byte (F_OFD_GETLK names a lock of another description
 * only) and gives one back, then rests before it takes again, so that the other, which
 * polls every millisecond, gets it.
 *
 * Rejected: a counter in shared memory (a killed daemon keeps its tokens), robust mutexes
 * (any process with the file mapped can overwrite them), waiting in F_OFD_SETLKW (a
 * thread there cannot be stopped).
 *
 * A daemon that misuses the locks slows its neighbours down, but never stops them: the
 * first thread needs no token.
 */
#include "daemon/memory/tokens.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/mem.h"

#define WANT_BYTE (UINT64_C(1) << 20)

struct tokens {
	int fd;
	unsigned int count, held;
	bool wanting;
	uint64_t took_ns; /* or last queried whether others need one */
	uint64_t rest_ns; /* none is taken before */
	bool mine[TOKENS_MAX];
};

static bool lock_set(const struct tokens *t, uint64_t byte, short type)
{
	struct flock lock = {
		.l_type = type, .l_whence = SEEK_SET, .l_start = (off_t)byte, .l_len = 1};

	return fcntl(t->fd, F_OFD_SETLK, &lock) == 0;
}

int tokens_open(const char *path, unsigned int count, struct tokens **tokens_p)
{
	struct tokens *t = mem_zalloc(sizeof(*t));

	if (!t)
		return err_pass(-ENOMEM);
	t->count = count < TOKENS_MAX ? count : TOKENS_MAX;
	t->fd = -1;
	if (count > 0) {
		/* daemons of one group share it, regardless of umask */
		t->fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC | O_NOFOLLOW, 0660);
		if (t->fd < 0) {
			mem_free(t);
			return err_raise_errno(errno, "%s", path);
		}
		(void)fchmod(t->fd, 0660);
	}
	*tokens_p = t;
	return 0;
}

void tokens_free(struct tokens *t)
{
	if (!t)
		return;
	mem_closep(&t->fd); /* and with it the locks */
	mem_free(t);
}

unsigned int tokens_held(const struct tokens *t)
{
	return t ? t->held : 0;
}

static void want(struct tokens *t, bool wanting)
{
	if (t->wanting == wanting || t->count == 0)
		return;
	t->wanting = wanting;
	(void)lock_set(t, WANT_BYTE, wanting ? F_RDLCK : F_UNLCK);
}

static bool wanted_by_others(const struct tokens *t)
{
	/* Would an exclusive lock conflict? Shared locks of other descriptions do; this
	 * daemon's own one, on this description, does not. */
	struct flock lock = {.l_type = F_WRLCK,
			     .l_whence = SEEK_SET,
			     .l_start = (off_t)WANT_BYTE,
			     .l_len = 1};

	return fcntl(t->fd, F_OFD_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}

/* Each daemon starts at another token, so that they rarely try one that is taken. */
static bool tokens_take(struct tokens *t)
{
	unsigned int start = (unsigned int)getpid() * 2654435761u;

	for (unsigned int i = 0; i < t->count; i++) {
		unsigned int byte = (start + i) % t->count;

		if (t->mine[byte] || !lock_set(t, byte, F_WRLCK))
			continue;
		t->mine[byte] = true;
		t->held++;
		return true;
	}
	return false;
}

static void give(struct tokens *t)
{
	for (unsigned int byte = 0; byte < t->count; byte++) {
		if (!t->mine[byte])
			continue;
		t->mine[byte] = false;
		t->held--;
		(void)lock_set(t, byte, F_UNLCK);
		return;
	}
}

bool tokens_may_run(struct tokens *t, unsigned int running, uint64_t now_ns)
{
	assert(!t || t->held <= t->count);
	if (!t || running < 1 + t->held)
		return true;
	if (now_ns >= t->rest_ns && tokens_take(t)) {
		if (t->held == 1)
			t->took_ns = now_ns;
		want(t, false);
		return true;
	}
	want(t, true);
	return false;
}

void tokens_settle(struct tokens *t, unsigned int running, bool more, uint64_t now_ns)
{
	assert(!t || t->held <= t->count);
	if (!t || t->count == 0)
		return;
	if (!more) {
		want(t, false);
		while (t->held > 0 && running < 1 + t->held)
			give(t);
		return;
	}
	if (t->held == 0 || now_ns < t->took_ns + TOKENS_HOLD_NS)
		return;
	t->took_ns = now_ns; /* also without a waiter: one poll per TOKENS_HOLD_NS */
	if (!wanted_by_others(t))
		return;
	give(t);
	t->rest_ns = now_ns + TOKENS_REST_NS;
}
