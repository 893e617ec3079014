/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A forked process with one listening socket and one connection at a time. All
 * that the test and it share lies in one anonymous shared mapping: the script (a
 * ring the test fills), the log (lines it appends), both published by an atomic
 * count. The status page is a sealed memfd, like the daemon's.
 */
#include "tests/lib/fake_kvd.h"
#include "tests/lib/tmp.h"
#include "daemon/base/clock.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stddef.h>
#include <setjmp.h>
#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define SCRIPT_MAX 64u
#define LOG_MAX 512u
#define LINE_MAX_BYTES 16384u
#define PAGE_BYTES                          \
	(sizeof(struct kvd_status_header) + \
	 FAKE_KVD_SLOTS * sizeof(struct kvd_status_slot))
#define RING_BYTES (KVD_RING_HEADER_BYTES + FAKE_KVD_ENTRIES * KVD_RING_ENTRY_BYTES)

struct shared {
	_Atomic unsigned int script_head, script_tail; /* tail: next to be used */
	char script[SCRIPT_MAX][LINE_MAX_BYTES];
	atomic_bool hello_set;
	_Atomic int64_t shift_ns;
	char hello[LINE_MAX_BYTES];
	_Atomic unsigned int log_count;
	struct {
		unsigned int fd_count;
		char text[LINE_MAX_BYTES];
	} log[LOG_MAX];
};

struct fake_kvd {
	char dir[64], path[96];
	pid_t pid;
	int page_fd, listen_fd, ring_fds[3]; /* ring, arena, eventfd */
	struct kvd_status_header *page;
	struct kvd_ring_header *ring;
	uint8_t *arena;
	struct shared *shared;
};

/* ---- the process ------------------------------------------------------------ */

struct conn {
	int fd;
	char in[1 << 20];
	size_t len;
	unsigned int fds;
	char id[32], prev[32];
};

static void send_fds(int fd, const char *text, size_t len, const int *fds,
		     unsigned int count)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(4 * sizeof(int))];
	} control = {0};
	struct iovec iov = {(void *)(uintptr_t)text, len};
	struct msghdr msg = {.msg_iov = &iov, .msg_iovlen = 1};
	struct cmsghdr *c;

	if (count) {
		msg.msg_control = control.bytes;
		msg.msg_controllen = CMSG_SPACE(count * sizeof(int));
		c = CMSG_FIRSTHDR(&msg);
		c->cmsg_level = SOL_SOCKET;
		c->cmsg_type = SCM_RIGHTS;
		c->cmsg_len = CMSG_LEN(count * sizeof(int));
		memcpy(CMSG_DATA(c), fds, count * sizeof(int));
	}
	if (len && sendmsg(fd, &msg, MSG_NOSIGNAL) != (ssize_t)len)
		_exit(3);
}

/* answer with its %ID% and %PREV% filled in */
static size_t fill_in(const struct conn *conn, const char *answer, char *out)
{
	size_t n = 0;

	while (*answer) {
		const char *with = NULL;
		size_t skip = 0;

		if (!strncmp(answer, "%ID%", 4)) {
			with = conn->id;
			skip = 4;
		} else if (!strncmp(answer, "%PREV%", 6)) {
			with = conn->prev;
			skip = 6;
		}
		if (with) {
			memcpy(out + n, with, strlen(with));
			n += strlen(with);
			answer += skip;
		} else {
			out[n++] = *answer++;
		}
	}
	if (n)
		out[n++] = '\n';
	return n;
}

static bool conn_answer(struct fake_kvd *f, struct conn *conn, const char *line)
{
	static const char ok[] = "{\"id\":%ID%,\"ok\":true}";
	struct shared *sh = f->shared;
	unsigned int tail = atomic_load(&sh->script_tail);
	char text[LINE_MAX_BYTES + 1024], page[512];
	int fds[4] = {f->page_fd, f->page_fd, f->page_fd, f->page_fd};
	const char *answer = ok;
	unsigned int fd_count = 0;

	if (strstr(line, "\"cmd\":\"hello\"")) {
		snprintf(page, sizeof(page),
			 "{\"id\":%%ID%%,\"ok\":true,\"proto\":1,\"daemon\":\"kvd 9.9\","
			 "\"name\":\"fake\",\"instance\":\"%032x\",\"pid\":%d,"
			 "\"session\":7,\"epoch\":\"77\",\"time_ns\":\"%llu\","
			 "\"endpoint\":\"tcp://[::1]:1\","
			 "\"status\":{\"slots\":%u,\"bytes\":%zu}}",
			 (unsigned int)getpid(), (int)getpid(),
			 (unsigned long long)clock_ns() +
				 (unsigned long long)atomic_load(&sh->shift_ns),
			 FAKE_KVD_SLOTS, PAGE_BYTES);
		fd_count = !atomic_load(&sh->hello_set);
		answer = fd_count ? page : sh->hello;
		atomic_store(&sh->hello_set, false);
	} else if (tail != atomic_load(&sh->script_head)) {
		answer = sh->script[tail % SCRIPT_MAX];
		atomic_store(&sh->script_tail, tail + 1);
	}
	if (!strcmp(answer, "!close"))
		return false;
	if (!strcmp(answer, "!fds")) {
		answer = ok;
		fd_count = 4;
	}
	if (!strncmp(answer, "!ring", 5)) {
		snprintf(
			page, sizeof(page),
			"{\"id\":%%ID%%,\"ok\":true,\"entries\":%u,\"arena_bytes\":%u%s}",
			FAKE_KVD_ENTRIES, FAKE_KVD_ARENA_BYTES, answer + 5);
		memcpy(fds, f->ring_fds, sizeof(f->ring_fds));
		answer = page;
		fd_count = 3;
	}
	send_fds(conn->fd, text, fill_in(conn, answer, text), fds, fd_count);
	return true;
}

static bool conn_line(struct fake_kvd *f, struct conn *conn, const char *line)
{
	struct shared *sh = f->shared;
	unsigned int n = atomic_load(&sh->log_count);
	size_t len;

	memcpy(conn->prev, conn->id, sizeof(conn->prev));
	if (sscanf(line, "{\"id\":%31[0-9]", conn->id) != 1 || n == LOG_MAX)
		_exit(4);
	len = strnlen(line, LINE_MAX_BYTES - 1);
	memcpy(sh->log[n].text, line, len);
	sh->log[n].text[len] = '\0';
	sh->log[n].fd_count = conn->fds;
	conn->fds = 0;
	atomic_store(&sh->log_count, n + 1);
	return conn_answer(f, conn, line);
}

static bool conn_read(struct fake_kvd *f, struct conn *conn)
{
	union {
		struct cmsghdr align;
		char bytes[CMSG_SPACE(16 * sizeof(int))];
	} control;
	struct iovec iov = {conn->in + conn->len, sizeof(conn->in) - conn->len};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = control.bytes,
			     .msg_controllen = sizeof(control.bytes)};
	ssize_t n = recvmsg(conn->fd, &msg, MSG_CMSG_CLOEXEC);
	struct cmsghdr *c;
	char *nl, *at = conn->in;

	if (n <= 0)
		return false;
	for (c = CMSG_FIRSTHDR(&msg); c; c = CMSG_NXTHDR(&msg, c)) {
		size_t count = (c->cmsg_len - CMSG_LEN(0)) / sizeof(int);
		int fd;

		for (size_t i = 0; c->cmsg_type == SCM_RIGHTS && i < count; i++) {
			memcpy(&fd, CMSG_DATA(c) + i * sizeof(int), sizeof(fd));
			close(fd);
			conn->fds++;
		}
	}
	conn->len += (size_t)n;
	while ((nl = memchr(at, '\n', conn->len - (size_t)(at - conn->in)))) {
		*nl = '\0';
		if (!conn_line(f, conn, at))
			return false;
		at = nl + 1;
	}
	conn->len -= (size_t)(at - conn->in);
	memmove(conn->in, at, conn->len);
	return true;
}

static void serve(struct fake_kvd *f)
{
	struct conn *conn = calloc(1, sizeof(*conn));

	prctl(PR_SET_PDEATHSIG, SIGKILL);
	for (;;) {
		conn->fd = accept4(f->listen_fd, NULL, NULL, SOCK_CLOEXEC);
		if (conn->fd < 0)
			_exit(5);
		conn->len = 0;
		while (conn_read(f, conn))
			;
		close(conn->fd);
	}
}

/* ---- the test's side ---------------------------------------------------------- */

static void *memory_new(size_t bytes, int *fd_p)
{
	void *at;

	*fd_p = memfd_create("fake-kvd", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	assert_true(*fd_p >= 0);
	assert_int_equal(ftruncate(*fd_p, (off_t)bytes), 0);
	assert_int_equal(fcntl(*fd_p, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW), 0);
	at = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_SHARED, *fd_p, 0);
	assert_true(at != MAP_FAILED);
	return at;
}

static void ring_new(struct fake_kvd *f)
{
	f->ring = memory_new(RING_BYTES, &f->ring_fds[0]);
	f->arena = memory_new(FAKE_KVD_ARENA_BYTES, &f->ring_fds[1]);
	f->ring_fds[2] = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
	assert_true(f->ring_fds[2] >= 0);
	f->ring->magic = KVD_RING_MAGIC;
	f->ring->version = KVD_RING_VERSION;
}

static void page_new(struct fake_kvd *f)
{
	f->page = memory_new(PAGE_BYTES, &f->page_fd);
	f->page->magic = KVD_STATUS_MAGIC;
	f->page->slots = FAKE_KVD_SLOTS;
	f->page->engine_first = FAKE_KVD_SLOTS / 2;
	f->page->slot_bytes = KVD_STATUS_SLOT_BYTES;
	f->page->heartbeat_interval_ns = 1000000;
	fake_kvd_heartbeat(f, true);
}

static void process_start(struct fake_kvd *f)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};

	unlink(f->path);
	f->listen_fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
	assert_true(f->listen_fd >= 0);
	snprintf(addr.sun_path, sizeof(addr.sun_path), "%s", f->path);
	assert_int_equal(bind(f->listen_fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(listen(f->listen_fd, 8), 0);
	f->pid = fork();
	assert_true(f->pid >= 0);
	if (!f->pid)
		serve(f);
	close(f->listen_fd);
}

void fake_kvd_start(struct fake_kvd **fake_p)
{
	struct fake_kvd *f = calloc(1, sizeof(*f));

	assert_non_null(f);
	assert_non_null(mkdtemp(tmp_path(f->dir, sizeof(f->dir), "fake-kvd-XXXXXX")));
	snprintf(f->path, sizeof(f->path), "%s/fake.sock", f->dir);
	f->shared = mmap(NULL, sizeof(*f->shared), PROT_READ | PROT_WRITE,
			 MAP_SHARED | MAP_ANONYMOUS, -1, 0);
	assert_true(f->shared != MAP_FAILED);
	page_new(f);
	ring_new(f);
	process_start(f);
	*fake_p = f;
}

void fake_kvd_kill(struct fake_kvd *f)
{
	if (f->pid > 0) {
		kill(f->pid, SIGKILL);
		waitpid(f->pid, NULL, 0);
	}
	f->pid = 0;
}

static void page_free(struct fake_kvd *f)
{
	munmap(f->page, PAGE_BYTES);
	close(f->page_fd);
}

void fake_kvd_restart(struct fake_kvd *f)
{
	page_free(f);
	page_new(f);
	process_start(f);
}

void fake_kvd_free(struct fake_kvd *f)
{
	fake_kvd_kill(f);
	page_free(f);
	munmap(f->ring, RING_BYTES);
	munmap(f->arena, FAKE_KVD_ARENA_BYTES);
	for (unsigned int i = 0; i < 3; i++)
		close(f->ring_fds[i]);
	munmap(f->shared, sizeof(*f->shared));
	unlink(f->path);
	rmdir(f->dir);
	free(f);
}

const char *fake_kvd_path(const struct fake_kvd *f)
{
	return f->path;
}

pid_t fake_kvd_pid(const struct fake_kvd *f)
{
	return f->pid;
}

void fake_kvd_answer(struct fake_kvd *f, const char *answer)
{
	unsigned int head = atomic_load(&f->shared->script_head);

	assert_true(head - atomic_load(&f->shared->script_tail) < SCRIPT_MAX);
	snprintf(f->shared->script[head % SCRIPT_MAX], LINE_MAX_BYTES, "%s", answer);
	atomic_store(&f->shared->script_head, head + 1);
}

void fake_kvd_drop_answers(struct fake_kvd *f)
{
	atomic_store(&f->shared->script_tail, atomic_load(&f->shared->script_head));
}

void fake_kvd_shift(struct fake_kvd *f, int64_t ns)
{
	atomic_store(&f->shared->shift_ns, ns);
}

void fake_kvd_hello(struct fake_kvd *f, const char *answer)
{
	snprintf(f->shared->hello, LINE_MAX_BYTES, "%s", answer);
	atomic_store(&f->shared->hello_set, true);
}

const char *fake_kvd_line(struct fake_kvd *f, unsigned int n, unsigned int *fd_count_p)
{

	for (unsigned int i = 0; fake_kvd_lines(f) <= n && i < 50000; i++)
		poll(NULL, 0, 1);
	if (fake_kvd_lines(f) <= n)
		fail_msg("line %u never came", n);
	if (fd_count_p)
		*fd_count_p = f->shared->log[n].fd_count;
	return f->shared->log[n].text;
}

unsigned int fake_kvd_lines(const struct fake_kvd *f)
{
	return atomic_load(&f->shared->log_count);
}

struct kvd_status_header *fake_kvd_page(struct fake_kvd *f)
{
	return f->page;
}

struct kvd_status_slot *fake_kvd_slot(struct fake_kvd *f, unsigned int slot)
{
	return (struct kvd_status_slot *)(void *)(f->page + 1) + slot;
}

void fake_kvd_word(struct fake_kvd *f, unsigned int slot, uint32_t gen,
		   unsigned int state, unsigned int flags, unsigned int error)
{
	__atomic_store_n(&fake_kvd_slot(f, slot)->word,
			 kvd_word_make(gen, state, flags, error), __ATOMIC_RELEASE);
}

void fake_kvd_heartbeat(struct fake_kvd *f, bool fresh)
{
	/* a beat in the far future is never old */
	__atomic_store_n(&f->page->heartbeat_ns, fresh ? UINT64_MAX / 2 : 1,
			 __ATOMIC_RELAXED);
}

struct kvd_ring_header *fake_kvd_ring(struct fake_kvd *f)
{
	return f->ring;
}

const uint8_t *fake_kvd_arena(struct fake_kvd *f)
{
	return f->arena;
}
