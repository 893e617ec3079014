/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Descriptors of every kind, in any order, with any line: a client of a daemon with real
 * gates draws what it sends from a seed. Whatever it sends, the daemon's thread does not
 * wait, a client of another kind is answered, and nothing is left open.
 *
 * KVD_DESCRIPTORS_STEPS: how many (300); KVD_DESCRIPTORS_SEED: which.
 */
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/inotify.h>
#include <sys/mman.h>
#include <sys/signalfd.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/timerfd.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/loop/loop.h"
#include "tests/lib/control_client.h"

#define STEPS 300u
#define BYTES 65536
#define KEPT 8u
/* Of a loop that waits for no descriptor, on a slow machine. */
#define TURN_MAX_NS (2 * LOOP_NS_PER_S)

static uint64_t seed;

static unsigned int draw(unsigned int below)
{
	seed ^= seed << 13;
	seed ^= seed >> 7;
	seed ^= seed << 17;
	return (unsigned int)(seed >> 33) % below;
}

/* ---- kinds; -1: not here ---- */

static int memory(unsigned int flags, off_t bytes, int seals)
{
	int fd = memfd_create("kind", MFD_CLOEXEC | flags);

	if (fd < 0)
		return -1;
	if (ftruncate(fd, bytes) < 0 || (seals && fcntl(fd, F_ADD_SEALS, seals) < 0)) {
		close(fd);
		return -1;
	}
	return fd;
}

static int sealed(void)
{
	return memory(MFD_ALLOW_SEALING, BYTES, F_SEAL_SHRINK);
}

static int unsealed(void)
{
	return memory(MFD_ALLOW_SEALING, BYTES, 0);
}

static int never_sealed(void)
{
	return memory(0, BYTES, 0);
}

static int read_only(void)
{
	return memory(MFD_ALLOW_SEALING, BYTES, F_SEAL_SHRINK | F_SEAL_WRITE);
}

static int empty(void)
{
	return memory(MFD_ALLOW_SEALING, 0, F_SEAL_SHRINK);
}

static int huge(void)
{
	return memory(MFD_HUGETLB | MFD_ALLOW_SEALING, 2 << 20, F_SEAL_SHRINK);
}

static int first_of(int pair[2])
{
	close(pair[1]);
	return pair[0];
}

static int pipe_end(void)
{
	int pair[2];

	return pipe2(pair, O_CLOEXEC) < 0 ? -1 : first_of(pair);
}

static int stream(void)
{
	int pair[2];

	return socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0
		       ? -1
		       : first_of(pair);
}

static void send_fd(int socket, int fd)
{
	struct client as = {.fd = socket};

	client_send_fds(&as, "x", &fd, 1);
}

/* A socket in whose queue it lies itself. */
static int circle(void)
{
	int pair[2];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return -1;
	send_fd(pair[1], pair[0]);
	return first_of(pair);
}

static int datagram(void)
{
	return socket(AF_INET, SOCK_DGRAM | SOCK_CLOEXEC, 0);
}

static int listener(void)
{
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);

	assert_int_equal(listen(fd, 1), 0);
	return fd;
}

static int event(void)
{
	return eventfd(0, EFD_CLOEXEC);
}

static int timer(void)
{
	return timerfd_create(CLOCK_MONOTONIC, TFD_CLOEXEC);
}

static int signals(void)
{
	sigset_t none;

	sigemptyset(&none);
	return signalfd(-1, &none, SFD_CLOEXEC);
}

static int epoll_of_an_event(void)
{
	struct epoll_event on = {.events = EPOLLIN};
	int fd = epoll_create1(EPOLL_CLOEXEC), watched = event();

	assert_int_equal(epoll_ctl(fd, EPOLL_CTL_ADD, watched, &on), 0);
	close(watched);
	return fd;
}

static int watcher(void)
{
	return inotify_init1(IN_CLOEXEC);
}

static int process(void)
{
	return (int)syscall(SYS_pidfd_open, getpid(), 0);
}

static int path_only(void)
{
	return open("/proc/self/mem", O_PATH | O_CLOEXEC);
}

static int own_memory(void)
{
	return open("/proc/self/mem", O_RDWR | O_CLOEXEC);
}

static int own_statm(void)
{
	return open("/proc/self/statm", O_RDONLY | O_CLOEXEC);
}

static int own_maps(void)
{
	return open("/proc/self/maps", O_RDONLY | O_CLOEXEC);
}

static int folder(void)
{
	return open("/proc/self/fd", O_RDONLY | O_DIRECTORY | O_CLOEXEC);
}

static int null_device(void)
{
	return open("/dev/null", O_RDWR | O_CLOEXEC);
}

static int zero_device(void)
{
	return open("/dev/zero", O_RDWR | O_CLOEXEC);
}

static int terminal(void)
{
	return open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC);
}

static int program(void)
{
	return open("/proc/self/exe", O_RDONLY | O_CLOEXEC);
}

static const struct {
	const char *name;
	int (*open)(void);
	bool memory; /* fit for a region */
} kinds[] = {
	{"sealed memfd", sealed, true},
	{"memfd", unsealed, true},
	{"memfd without seals", never_sealed, false},
	{"memfd for reading", read_only, true},
	{"empty memfd", empty, false},
	{"memfd of huge pages", huge, false},
	{"pipe", pipe_end, false},
	{"socket", stream, false},
	{"socket in its own queue", circle, false},
	{"UDP socket", datagram, false},
	{"listening socket", listener, false},
	{"eventfd", event, false},
	{"timerfd", timer, false},
	{"signalfd", signals, false},
	{"epoll", epoll_of_an_event, false},
	{"inotify", watcher, false},
	{"pidfd", process, false},
	{"O_PATH", path_only, false},
	{"/proc/self/mem", own_memory, false},
	{"/proc/self/statm", own_statm, false},
	{"/proc/self/maps", own_maps, false},
	{"folder", folder, false},
	{"/dev/null", null_device, false},
	{"/dev/zero", zero_device, false},
	{"terminal", terminal, false},
	{"program file", program, false},
};

static int any_kind(void)
{
	int fd = -1;

	while (fd < 0)
		fd = kinds[draw(ARRAY_LEN(kinds))].open();
	return fd;
}

/* ---- what is done with them ---- */

static const char *const lines[] = {
	"{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,\"length\":65536,"
	"\"address\":\"65536\"}\n",
	"{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":1,\"length\":4096}\n",
	"{\"cmd\":\"region.register\",\"kind\":\"vm\",\"fd\":0,\"length\":4096,"
	"\"address\":\"4096\"}\n",
	"{\"cmd\":\"region.register\",\"kind\":\"dmabuf\",\"fd\":0,\"length\":4096}\n",
	"{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,\"length\":4096,"
	"\"statm\":1}\n",
	"{\"cmd\":\"session.list\"}\n",
	"{\"cmd\":\"ping\"}\n",
	"no line\n",
	"{\"cmd\":\"ping\"",
	"{\"cmd\":\"ping\"}\n{\"cmd\":\"ping\"}\n",
};

struct stage {
	struct mini mini;
	struct client client, witness;
	int kept[KEPT]; /* still open at the sender's */
	uint64_t longest_ns;
};

static void turn(struct stage *s)
{
	uint64_t before = loop_clock_ns(s->mini.kvd.loop), took;

	loop_turn(s->mini.kvd.loop, LOOP_NS_PER_MS);
	took = loop_clock_ns(s->mini.kvd.loop) - before;
	if (took > s->longest_ns)
		s->longest_ns = took;
}

/* Bytes and descriptors are on their way; nobody waits for an answer. */
static void throw(struct stage * s)
{
	const char *line = lines[draw(ARRAY_LEN(lines))];
	unsigned int count = draw(8) ? 1 + draw(2) : 1 + draw(30);
	int fds[31];

	for (unsigned int i = 0; i < count; i++)
		fds[i] = any_kind();
	if (draw(8) == 0) /* the descriptors come with half of it */
		client_send(&s->client, line, draw((unsigned int)strlen(line)));
	client_send_fds(&s->client, line, fds, count);
	for (unsigned int i = 0; i < count; i++) {
		int *kept = &s->kept[draw(KEPT)];

		mem_closep(kept);
		*kept = fds[i];
	}
}

static void reopen(struct stage *s)
{
	client_close(&s->client);
	client_open(&s->client, &s->mini);
}

/* Cuts what may be a region by now. */
static void cut(struct stage *s)
{
	int fd = s->kept[draw(KEPT)];

	if (fd >= 0)
		(void)!ftruncate(fd, draw(BYTES));
}

static void step(struct stage *s)
{
	char answers[4096];

	switch (draw(8)) {
	case 0:
		reopen(s);
		break;
	case 1:
		cut(s);
		break;
	default:
		throw(s);
		break;
	}
	turn(s);
	/* unread answers would end it; it may have been hung up on */
	while (recv(s->client.fd, answers, sizeof(answers), MSG_DONTWAIT) > 0)
		;
	if (errno != EAGAIN || draw(16) == 0)
		reopen(s);
	client_call_ok(&s->witness, "{\"cmd\":\"ping\"}");
}

static unsigned long number(const char *name, unsigned long otherwise)
{
	const char *text = getenv(name);

	return text ? strtoul(text, NULL, 0) : otherwise;
}

static void descriptor_of_any_kind_blocks_no_other_client(void **state)
{
	unsigned long steps = number("KVD_DESCRIPTORS_STEPS", STEPS);
	struct stage s;

	(void)state;
	seed = number("KVD_DESCRIPTORS_SEED", 1) | UINT64_C(1) << 40;
	mini_config(&s.mini);
	mini_start(&s.mini);
	s.longest_ns = 0;
	memset(s.kept, -1, sizeof(s.kept));
	client_open(&s.client, &s.mini);
	client_open(&s.witness, &s.mini);
	for (unsigned long i = 0; i < steps; i++)
		step(&s);
	client_close(&s.client);
	client_close(&s.witness);
	for (unsigned int i = 0; i < KEPT; i++)
		mem_closep(&s.kept[i]);
	mini_stop(&s.mini);
	assert_true(s.longest_ns < TURN_MAX_NS);
}

/* The answer is the same whatever the kind: a region, or a reason. */
static void each_kind_as_a_region_is_taken_or_refused_with_a_reason(void **state)
{
	struct mini mini;
	struct client client;

	(void)state;
	mini_config(&mini);
	mini_start(&mini);
	client_open(&client, &mini);
	for (unsigned int i = 0; i < ARRAY_LEN(kinds); i++) {
		int fd = kinds[i].open();
		cJSON *reply;

		if (fd < 0)
			continue;
		reply = client_call_fd(&client, fd,
				       "{\"cmd\":\"region.register\",\"kind\":\"memfd\","
				       "\"fd\":0,\"length\":%d}",
				       BYTES);
		close(fd);
		if (kinds[i].memory && *reply_code(reply))
			fail_msg("%s: %s", kinds[i].name, cJSON_PrintUnformatted(reply));
		if (!kinds[i].memory && strcmp(reply_code(reply), "EIMPORT") != 0 &&
		    strcmp(reply_code(reply), "ERANGE") != 0 &&
		    strcmp(kinds[i].name, "memfd of huge pages") != 0)
			fail_msg("%s: \"%s\"", kinds[i].name, reply_code(reply));
		cJSON_Delete(reply);
	}
	client_close(&client);
	mini_stop(&mini);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(each_kind_as_a_region_is_taken_or_refused_with_a_reason),
		cmocka_unit_test(descriptor_of_any_kind_blocks_no_other_client),
	};

	return cmocka_run_group_tests_name("descriptors", tests, NULL, NULL);
}
