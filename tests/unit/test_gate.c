/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Gates: what a stranger sends never makes the daemon's thread wait. The strangers are
 * sockets of this process; what they send is a TCP socket that lingers for years when it
 * is closed.
 */
#include "daemon/gate/gate.h"

#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sched.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/mount.h>
#include <sys/socket.h>
#include <sys/vfs.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/gate/record.h"
#include "daemon/gate/vet.h"
#include "daemon/loop/loop.h"
#include "tests/lib/gates.h"
#include "tests/lib/limits.h"

#define USER 4242u
#define WAIT_NS (20 * LOOP_NS_PER_S)
/* Of a loop that does not wait for strangers, on a slow machine; they linger longer. */
#define TURN_MAX_NS (LOOP_NS_PER_S)

struct rig {
	struct loop *loop;
	struct gates *gates;
	uint64_t longest_ns;
};

struct stranger {
	struct gate_client client;
	int near, far;
	unsigned int parcels, fds;
	struct err fault;
	char bytes[256];
	size_t len;
};

static void rig_begin(struct rig *r)
{
	*r = (struct rig){.loop = NULL};
	assert_int_equal(loop_new(&r->loop), 0);
	gates_begin(r->loop, &r->gates);
}

static void rig_end(struct rig *r)
{
	assert_true(r->longest_ns < TURN_MAX_NS);
	gates_free(r->gates);
	loop_free(r->loop);
}

static void rig_turn(struct rig *r)
{
	uint64_t before = loop_clock_ns(r->loop), took;

	loop_turn(r->loop, 5 * LOOP_NS_PER_MS);
	took = loop_clock_ns(r->loop) - before;
	if (took > r->longest_ns)
		r->longest_ns = took;
}

static void stranger_on_parcel(struct gate_client *client, struct gate_parcel *parcel)
{
	struct stranger *s = container_of(client, struct stranger, client);

	assert_true(s->len + parcel->len <= sizeof(s->bytes));
	memcpy(s->bytes + s->len, parcel->bytes, parcel->len);
	s->len += parcel->len;
	s->fds += parcel->fd_count;
	s->fault = parcel->fault;
	s->parcels++;
}

static void stranger_begin(struct rig *r, struct stranger *s)
{
	int pair[2];

	*s = (struct stranger){.client = {.on_parcel = stranger_on_parcel}};
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	s->near = pair[0];
	s->far = pair[1];
	assert_int_equal(gate_prepare(s->near), 0);
	assert_int_equal(gate_hold(r->gates, &s->client, s->near, USER), 0);
}

static void stranger_end(struct stranger *s)
{
	gate_close(&s->client, &s->near);
	close(mem_steal_fd(&s->far));
}

static void stranger_send(struct stranger *s, const char *text, int fd)
{
	assert_int_equal(record_send(s->far, text, strlen(text), NULL, 0, &fd, fd >= 0),
			 strlen(text));
}

static void stranger_ask(struct stranger *s)
{
	char seen[256];
	bool with = false;
	ssize_t n = gate_peek(s->near, seen, sizeof(seen), &with);

	assert_true(n > 0 && with);
	gate_receive(&s->client, GATE_LINES, (size_t)n, 4);
}

static void stranger_wait(struct rig *r, const struct stranger *s, unsigned int parcels)
{
	uint64_t end = loop_clock_ns(r->loop) + WAIT_NS;

	while (s->parcels < parcels) {
		assert_true(loop_clock_ns(r->loop) < end);
		rig_turn(r);
	}
}

/* A socket whose last close() waits for a peer that never reads. */
static int lingering(int *peer_p)
{
	struct sockaddr_in addr = {.sin_family = AF_INET,
				   .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
	struct linger linger = {.l_onoff = 1, .l_linger = 1 << 30};
	socklen_t len = sizeof(addr);
	int listener = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	static char junk[65536];

	assert_int_equal(bind(listener, (struct sockaddr *)&addr, len), 0);
	assert_int_equal(listen(listener, 1), 0);
	assert_int_equal(getsockname(listener, (struct sockaddr *)&addr, &len), 0);
	assert_int_equal(connect(fd, (struct sockaddr *)&addr, len), 0);
	*peer_p = accept(listener, NULL, NULL);
	close(listener);
	assert_int_equal(setsockopt(fd, SOL_SOCKET, SO_LINGER, &linger, sizeof(linger)),
			 0);
	while (send(fd, junk, sizeof(junk), MSG_DONTWAIT) > 0)
		;
	return fd;
}

/* ---- what may come in ---- */

static void vet_accepts_memory_and_refuses_blocking_files(void **state)
{
	char what[64];
	int fd, pair[2];

	(void)state;
	fd = memfd_create("x", MFD_CLOEXEC);
	assert_int_equal(vet_fd(fd, what, sizeof(what)), 0);
	close(fd);
	fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC);
	assert_int_equal(vet_fd(fd, what, sizeof(what)), 0);
	assert_false(vet_is_statm(fd));
	close(fd);
	fd = open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
	assert_int_equal(vet_fd(fd, what, sizeof(what)), 0);
	assert_true(vet_is_statm(fd));
	close(fd);
	fd = open("/proc/self/status", O_RDONLY | O_CLOEXEC);
	assert_int_equal(vet_fd(fd, what, sizeof(what)), -1);
	close(fd);
	fd = open("/proc/self", O_PATH | O_CLOEXEC);
	assert_int_equal(vet_fd(fd, what, sizeof(what)), -1);
	assert_string_equal(what, "opened with O_PATH");
	close(fd);
	fd = eventfd(0, EFD_CLOEXEC);
	assert_int_equal(vet_fd(fd, what, sizeof(what)), -1);
	close(fd);
	assert_int_equal(pipe2(pair, O_CLOEXEC), 0);
	assert_int_equal(vet_fd(pair[0], what, sizeof(what)), -1);
	assert_string_equal(what, "a pipe");
	close(pair[0]);
	close(pair[1]);
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair), 0);
	assert_int_equal(vet_fd(pair[0], what, sizeof(what)), -1);
	assert_string_equal(what, "a socket");
	close(pair[0]);
	close(pair[1]);
	fd = open("/dev/shm", O_DIRECTORY | O_RDONLY | O_CLOEXEC);
	if (fd >= 0) {
		assert_int_equal(vet_fd(fd, what, sizeof(what)), -1);
		close(fd);
	}
}

/* A file passes by its file system; where a disk's is (this program's folder may lie in
 * an overlay) it may be used as a file. */
static void vet_takes_files_of_disks(void **state)
{
	static const uint32_t disks[] = {0xef53, 0x58465342, 0x9123683e, 0xf2f52010};
	struct statfs fs;
	char what[64];
	bool disk = false;
	int fd;

	(void)state;
	fd = open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
	assert_int_equal(fstatfs(fd, &fs), 0);
	for (size_t i = 0; i < ARRAY_LEN(disks); i++)
		disk |= (uint32_t)fs.f_type == disks[i];
	if (disk || fs.f_type == 0x794c7630) /* an overlay may have FUSE beneath it */
		assert_int_equal(vet_fd(fd, what, sizeof(what)), disk ? 0 : -1);
	if (disk)
		assert_true(vet_is_disk(fd, what, sizeof(what)));
	close(fd);
	fd = open("/", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
	assert_int_equal(vet_fd(fd, what, sizeof(what)), -1);
	assert_string_equal(what, "a directory");
	assert_false(vet_is_disk(fd, what, sizeof(what)));
	close(fd);
	fd = open("/proc/self/mem", O_RDWR | O_CLOEXEC); /* passes, and is no file */
	assert_int_equal(vet_fd(fd, what, sizeof(what)), 0);
	assert_false(vet_is_disk(fd, what, sizeof(what)));
	close(fd);
	fd = memfd_create("x", MFD_CLOEXEC);
	assert_true(vet_is_disk(fd, what, sizeof(what)));
	close(fd);
}

/* In a mount namespace, of a user namespace where that is needed. */
static int statm_that_is(const char *path)
{
	const int flags = CLONE_NEWNS | (geteuid() ? CLONE_NEWUSER : 0);

	if (unshare(flags) < 0 || mount(NULL, "/", NULL, MS_REC | MS_PRIVATE, NULL) < 0 ||
	    mount(path, "/proc/self/statm", NULL, MS_BIND, NULL) < 0)
		return -1;
	return open("/proc/self/statm", O_RDWR | O_CLOEXEC);
}

static void vet_detects_file_mounted_over_statm(void **state)
{
	char what[64];
	int status;
	pid_t pid = fork();

	(void)state;
	if (pid == 0) {
		int fd = statm_that_is("/proc/self/mem");

		_exit(fd < 0				   ? 77
		      : vet_fd(fd, what, sizeof(what)) < 0 ? 1 /* memory */
							   : vet_is_statm(fd));
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	if (WEXITSTATUS(status) == 77)
		skip();
	assert_int_equal(status, 0);
}

static void descriptors_arrive_with_their_line(void **state)
{
	int fd = memfd_create("x", MFD_CLOEXEC);
	struct stranger s;
	struct rig r;

	(void)state;
	rig_begin(&r);
	stranger_begin(&r, &s);
	stranger_send(&s, "one\ntwo\n", -1);
	stranger_send(&s, "three\nfour\n", fd);
	stranger_send(&s, "five\n", -1);
	stranger_ask(&s);
	stranger_wait(&r, &s, 1);
	assert_int_equal(s.len, strlen("one\ntwo\nthree\n"));
	assert_int_equal(s.fds, 1);
	assert_int_equal(s.fault.code, ERR_OK);
	close(fd);
	stranger_end(&s);
	rig_end(&r);
}

/* ---- what hangs ---- */

static void close_lingering_blocks_no_other_client(void **state)
{
	int fd = memfd_create("x", MFD_CLOEXEC), peer, bad = lingering(&peer);
	struct stranger evil, good;
	struct rig r;

	(void)state;
	rig_begin(&r);
	stranger_begin(&r, &evil);
	stranger_begin(&r, &good);
	stranger_send(&evil, "x\n", bad);
	close(mem_steal_fd(&bad));
	stranger_ask(&evil);
	stranger_wait(&r, &evil, 1);
	assert_int_equal(evil.fault.code, ERR_IMPORT);
	assert_int_equal(evil.fds, 0);
	/* the same user's other connection: through the gate that replaces the first */
	stranger_send(&good, "y\n", fd);
	stranger_ask(&good);
	stranger_wait(&r, &good, 1);
	assert_int_equal(good.fault.code, ERR_OK);
	assert_int_equal(good.fds, 1);
	close(fd);
	stranger_end(&evil);
	stranger_end(&good);
	rig_end(&r);
	close(peer);
}

/* Descriptors that nobody received, in a connection that is closed. */
static void close_with_descriptors_unread_does_not_wait(void **state)
{
	int peers[4], bad;
	struct stranger s;
	struct rig r;

	(void)state;
	rig_begin(&r);
	for (int way = 0; way < 4; way++) {
		int pair[2];

		bad = lingering(&peers[way]);
		if (way == 0) { /* held */
			stranger_begin(&r, &s);
			stranger_send(&s, "x", bad);
			close(mem_steal_fd(&bad));
			stranger_end(&s);
		} else { /* turned away: with an out-of-band byte, behind plain ones */
			assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
			s.far = pair[1];
			if (way == 3)
				stranger_send(&s, "plain", -1);
			stranger_send(&s, "x", bad);
			if (way == 2)
				assert_int_equal(send(s.far, "!", 1, MSG_OOB), 1);
			close(mem_steal_fd(&bad));
			gate_turn_away(r.gates, pair[0]);
			close(pair[1]);
		}
		for (int i = 0; i < 10; i++)
			rig_turn(&r);
	}
	rig_end(&r);
	for (int way = 0; way < 4; way++)
		close(peers[way]);
}

/* A peek passes it by and a read would drop it. */
static void descriptor_with_an_out_of_band_byte_is_seen(void **state)
{
	int peer, bad = lingering(&peer);
	union {
		struct cmsghdr head;
		char space[CMSG_SPACE(sizeof(int))];
	} control = {.head = {.cmsg_len = CMSG_LEN(sizeof(int)),
			      .cmsg_level = SOL_SOCKET,
			      .cmsg_type = SCM_RIGHTS}};
	char byte = '!';
	struct iovec iov = {&byte, 1};
	struct msghdr msg = {.msg_iov = &iov,
			     .msg_iovlen = 1,
			     .msg_control = &control,
			     .msg_controllen = sizeof(control)};
	struct stranger s;
	struct rig r;

	(void)state;
	rig_begin(&r);
	stranger_begin(&r, &s);
	memcpy(CMSG_DATA(&control.head), &bad, sizeof(bad));
	if (sendmsg(s.far, &msg, MSG_OOB) < 0) {
		print_message("skipped: this kernel has no out-of-band Unix bytes\n");
	} else {
		close(mem_steal_fd(&bad));
		stranger_send(&s, "\n", -1);
		stranger_ask(&s);
		stranger_wait(&r, &s, 1);
		assert_int_equal(s.fault.code, ERR_IMPORT);
	}
	mem_closep(&bad);
	stranger_end(&s);
	rig_end(&r);
	close(peer);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(vet_accepts_memory_and_refuses_blocking_files),
		cmocka_unit_test(vet_takes_files_of_disks),
		cmocka_unit_test(vet_detects_file_mounted_over_statm),
		cmocka_unit_test(descriptors_arrive_with_their_line),
		cmocka_unit_test(close_lingering_blocks_no_other_client),
		cmocka_unit_test(close_with_descriptors_unread_does_not_wait),
		cmocka_unit_test(descriptor_with_an_out_of_band_byte_is_seen),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
