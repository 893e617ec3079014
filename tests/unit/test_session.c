/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The end of a session for each cause: EOF, kill -9, a socket kept open by a child,
 * memory that is freed while the process stays. Engines are child processes; ends are
 * timed against the two seconds that invariant 4 allows.
 */
#include "daemon/session/session.h"

#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/clock.h"
#include "daemon/base/mem.h"
#include "daemon/request/commands.h"
#include "daemon/control/control.h"
#include "daemon/session/session_watch.h"
#include "daemon/session/status.h"
#include "tests/lib/control_client.h"
#include "tests/lib/file.h"

#ifndef SO_PEERPIDFD
#define SO_PEERPIDFD 77
#endif

static int start(void **state)
{
	struct mini *mini = mem_zalloc(sizeof(*mini));

	mini_config(mini);
	mini_start(mini);
	*state = mini;
	return 0;
}

static int stop(void **state)
{
	mini_stop(*state);
	mem_free(*state);
	return 0;
}

static struct session *session_of(struct mini *mini, pid_t pid)
{
	struct session *session;

	list_foreach(session, &mini->kvd.sessions, link) {
		if (session->pid == pid)
			return session;
	}
	return NULL;
}

/* ---- engines ---- */

enum ending { ENGINE_WAITS, ENGINE_FORKS };

/* Connect, send hello, register a memfd, then wait to be killed. */
static void engine_main(const char *path, enum ending ending, int ready_fd)
{
	static const char hello[] =
		"{\"cmd\":\"hello\",\"proto\":1,\"client\":\"engine\"}\n";
	static const char line[] = "{\"cmd\":\"region.register\",\"kind\":\"memfd\","
				   "\"fd\":0,\"length\":1048576,\"statm\":1}\n";
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	struct client client = {.fd = socket(AF_UNIX, SOCK_STREAM, 0)};
	int memory = memfd_create("engine", MFD_ALLOW_SEALING);
	int fds[] = {memory, open("/proc/self/statm", O_RDONLY | O_CLOEXEC)};
	char reply[8192];

	strcpy(addr.sun_path, path);
	if (connect(client.fd, (struct sockaddr *)&addr, sizeof(addr)) < 0 ||
	    file_fill(memory, 1 << 20) < 0 ||
	    send(client.fd, hello, sizeof(hello) - 1, 0) < 0 ||
	    read(client.fd, reply, sizeof(reply)) <= 0)
		_exit(1);
	client_send_fds(&client, line, fds, 2);
	if (read(client.fd, reply, sizeof(reply)) <= 0)
		_exit(2);
	if (ending == ENGINE_FORKS && fork() == 0)
		pause(); /* keeps the socket, the memfd and ready_fd */
	if (write(ready_fd, "r", 1) != 1)
		_exit(3);
	for (;;)
		pause();
}

struct engine {
	pid_t pid;
	int ready; /* read end; closed by the last process that keeps it */
	struct mini *mini;
};

static bool engine_is_ready(void *arg)
{
	const struct engine *engine = arg;
	char c;

	return read(engine->ready, &c, 1) == 1;
}

static void engine_start(struct engine *engine, struct mini *mini, enum ending ending)
{
	int pipes[2];

	assert_int_equal(pipe2(pipes, O_CLOEXEC | O_NONBLOCK), 0);
	engine->mini = mini;
	engine->ready = pipes[0];
	engine->pid = fork();
	if (engine->pid == 0) {
		setpgid(0, 0);
		engine_main(mini->config.socket_path, ending, pipes[1]);
	}
	setpgid(engine->pid, engine->pid);
	close(pipes[1]);
	mini_until(mini, engine_is_ready, engine, "the engine's registration");
	assert_non_null(session_of(mini, engine->pid));
	assert_int_equal(metrics_get(&mini->kvd.metrics, METRIC_REGIONS), 1);
}

/* Two seconds of normal turns: a machine that is stopped, or runs others, is not the
 * daemon's fault. */
static void expect_all_gone_within_2s(struct mini *mini)
{
	uint64_t spent_ms = 0;

	while (mini->kvd.session_count > 0) {
		uint64_t begin_ms = clock_ns() / 1000000, took_ms;

		mini_turn(mini);
		took_ms = clock_ns() / 1000000 - begin_ms;
		spent_ms += took_ms < 20 ? took_ms : 20;
		assert_true(spent_ms < 2000);
	}
	assert_int_equal(metrics_get(&mini->kvd.metrics, METRIC_REGIONS), 0);
}

static void engine_killed_is_detected_within_2s(void **state)
{
	struct mini *mini = *state;
	struct engine engine;

	engine_start(&engine, mini, ENGINE_WAITS);
	kill(engine.pid, SIGKILL);
	expect_all_gone_within_2s(mini);
	assert_int_equal(waitpid(engine.pid, NULL, 0), engine.pid);
	close(engine.ready);
}

/* The child keeps the connection open: no EOF arrives. It is notified and
 * disconnected. */
static void engine_killed_while_its_child_keeps_the_socket(void **state)
{
	struct mini *mini = *state;
	struct engine engine;

	engine_start(&engine, mini, ENGINE_FORKS);
	kill(engine.pid, SIGKILL);
	expect_all_gone_within_2s(mini);
	kill(-engine.pid, SIGKILL);
	assert_int_equal(waitpid(engine.pid, NULL, 0), engine.pid);
	close(engine.ready);
}

/* A stopped engine is no dead engine. */
static void engine_stopped_keeps_its_session(void **state)
{
	struct mini *mini = *state;
	struct engine engine;
	uint64_t until_ms;

	engine_start(&engine, mini, ENGINE_WAITS);
	kill(engine.pid, SIGSTOP);
	until_ms = clock_ns() / 1000000 + 700; /* three checks of statm */
	while (clock_ns() / 1000000 < until_ms)
		mini_turn(mini);
	assert_int_equal(mini->kvd.session_count, 1);
	kill(engine.pid, SIGKILL);
	mini_until_sessions(mini, 0);
	assert_int_equal(waitpid(engine.pid, NULL, 0), engine.pid);
	close(engine.ready);
}

/* The end of the memory is enough: the pidfd is not watched here. */
static void memory_removed_ends_the_session(void **state)
{
	struct mini *mini = *state;
	struct engine engine;
	struct session *session;

	engine_start(&engine, mini, ENGINE_FORKS); /* so that there is no EOF */
	session = session_of(mini, engine.pid);
	session_watch_stop(session->watch);
	assert_true(session_watch_alive(session->watch));
	kill(engine.pid, SIGKILL);
	mini_until_sessions(mini, 0);
	kill(-engine.pid, SIGKILL);
	assert_int_equal(waitpid(engine.pid, NULL, 0), engine.pid);
	close(engine.ready);
}

/* Gates let these in, as memory. */
static void statm_of_another_kind_is_refused(void **state)
{
	static const char *const paths[] = {"/proc/self/mem", "/proc/self/statm"};
	struct mini *mini = *state;
	struct client client;
	int fds[2] = {memfd_create("x", MFD_ALLOW_SEALING | MFD_CLOEXEC), -1};

	assert_int_equal(file_fill(fds[0], 4096), 0);
	client_open(&client, mini);
	for (size_t i = 0; i < ARRAY_LEN(paths); i++) {
		fds[1] = open(paths[i], O_RDONLY | O_CLOEXEC);
		client_send_fds(&client,
				"{\"cmd\":\"region.register\",\"kind\":\"memfd\","
				"\"fd\":0,\"length\":4096,\"statm\":1}\n",
				fds, 2);
		close(fds[1]);
		if (i == 0)
			expect_code(client_reply(&client), "EIMPORT");
		else
			expect_ok(client_reply(&client));
	}
	close(fds[0]);
	client_close(&client);
	mini_until_sessions(mini, 0);
}

/* A process that has ended before its connection is accepted gets no session. */
static void client_dead_before_accept_gets_no_session(void **state)
{
	struct mini *mini = *state;
	pid_t pid = fork();

	if (pid == 0) {
		struct sockaddr_un addr = {.sun_family = AF_UNIX};
		int fd = socket(AF_UNIX, SOCK_STREAM, 0);

		setpgid(0, 0);
		strcpy(addr.sun_path, mini->config.socket_path);
		if (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) == 0 &&
		    fork() == 0)
			pause(); /* its child keeps the connection */
		_exit(0);
	}
	assert_int_equal(waitpid(pid, NULL, 0), pid);
	while (metrics_get(&mini->kvd.metrics, METRIC_SESSIONS_REFUSED) == 0)
		mini_turn(mini);
	assert_int_equal(mini->kvd.session_count, 0);
	assert_int_equal(kill(-pid, SIGKILL), 0);
}

static int peer_pidfd_errno; /* 0: as it is */

int getsockopt(int fd, int level, int option, void *restrict value,
	       socklen_t *restrict len)
{
	errno = peer_pidfd_errno;
	if (option == SO_PEERPIDFD && peer_pidfd_errno)
		return -1;
	return (int)syscall(SYS_getsockopt, fd, level, option, value, len);
}

/* Its number may be reused by then. If the kernel cannot report that, the number is
 * all there is. */
static void client_reported_dead_gets_no_session(void **state)
{
	const struct {
		int no;
		enum err_code code;
	} rows[] = {{EINVAL, ERR_SESSION},
		    {ESRCH, ERR_SESSION},
		    {EMFILE, ERR_LIMIT},
		    {ENOPROTOOPT, ERR_OK},
		    {0, ERR_OK}};
	struct mini *mini = *state;

	for (size_t i = 0; i < ARRAY_LEN(rows); i++) {
		struct session_peer peer = {.pid = getpid(), .uid = geteuid()};
		struct session *session = NULL;
		int r, ends[2];

		assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, ends), 0);
		peer.fd = ends[0];
		peer_pidfd_errno = rows[i].no;
		r = session_new(&mini->kvd, &peer, NULL, &session);
		peer_pidfd_errno = 0;
		assert_int_equal(r < 0 ? err_last()->code : ERR_OK, rows[i].code);
		if (r >= 0)
			session_end(session, "done");
		mini_until_sessions(mini, 0);
		close(ends[0]);
		close(ends[1]);
	}
}

/* ---- hello ---- */

static void hello_has_identity_and_page(void **state)
{
	struct mini *mini = *state;
	struct client client;
	cJSON *reply;
	const struct kvd_status_header *header;

	client_connect(&client, mini);
	client_call_fails(&client, "ESTATE", "{\"cmd\":\"region.list\"}");
	client_call_ok(&client, "{\"cmd\":\"ping\"}"); /* needs no hello */
	client_call_fails(&client, "EVERSION",
			  "{\"cmd\":\"hello\",\"proto\":2,\"client\":\"x\"}");
	client_call_fails(
		&client, "EINVAL",
		"{\"cmd\":\"hello\",\"proto\":1,\"client\":\"x\",\"role\":\"cook\"}");
	client_call_fails(&client, "EINVAL", "{\"cmd\":\"hello\",\"proto\":1}");
	assert_int_equal(client.fd_count, 0);
	reply = client_call(&client, "{\"cmd\":\"hello\",\"proto\":1,\"client\":\"x\","
				     "\"role\":\"decode\"}");
	assert_int_equal(client.fd_count, 1);
	assert_int_equal(reply_int(reply, "pid"), getpid());
	assert_int_equal(reply_int(reply, "session"), 1);
	assert_string_equal(cJSON_GetObjectItem(reply, "name")->valuestring, "mini");
	assert_int_equal(strlen(cJSON_GetObjectItem(reply, "instance")->valuestring), 32);
	const cJSON *status = cJSON_GetObjectItem(reply, "status");
	size_t bytes = (size_t)reply_int(status, "bytes");

	header = mmap(NULL, bytes, PROT_READ, MAP_SHARED, client.fds[0], 0);
	assert_ptr_not_equal(header, MAP_FAILED);
	assert_true(header->magic == KVD_STATUS_MAGIC);
	assert_int_equal(header->slots, reply_int(status, "slots"));
	cJSON_Delete(reply);
	/* and it beats */
	uint64_t heartbeat = __atomic_load_n(&header->heartbeat_ns, __ATOMIC_ACQUIRE);

	while (__atomic_load_n(&header->heartbeat_ns, __ATOMIC_ACQUIRE) == heartbeat)
		mini_turn(mini);
	munmap((void *)(uintptr_t)header, bytes);
	client_close(&client);
}

static void page_outlives_the_session_until_all_has_drained(void **state)
{
	struct mini *mini = *state;
	struct client client;
	struct session *session;
	const struct kvd_status_header *header;
	uint64_t heartbeat;

	client_open(&client, mini);
	session = list_first(&mini->kvd.sessions, struct session, link);
	header = mmap(NULL, 4096, PROT_READ, MAP_SHARED, client.fds[0], 0);
	session_drain_begin(session); /* as a room that is not fenced yet */
	client_close(&client);
	while (!session->ending)
		mini_turn(mini);
	heartbeat = __atomic_load_n(&header->heartbeat_ns, __ATOMIC_ACQUIRE);
	while (__atomic_load_n(&header->heartbeat_ns, __ATOMIC_ACQUIRE) == heartbeat)
		mini_turn(mini);
	assert_int_equal(mini->kvd.session_count, 1);
	session_drain_end(session);
	mini_until_sessions(mini, 0);
	munmap((void *)(uintptr_t)header, 4096);
}

static void sessions_are_listed_to_their_user(void **state)
{
	struct mini *mini = *state;
	struct client first, second;
	struct session *session;
	cJSON *reply, *list;

	client_open(&first, mini);
	client_open(&second, mini);
	reply = client_call(&first, "{\"cmd\":\"session.list\"}");
	list = cJSON_GetObjectItem(reply, "sessions");
	assert_int_equal(cJSON_GetArraySize(list), 1);
	assert_int_equal(strlen(cJSON_GetObjectItem(list->child, "secret")->valuestring),
			 32);
	assert_true(cJSON_IsString(cJSON_GetObjectItem(list->child, "epoch")));
	cJSON_Delete(reply);
	reply = client_call(&first, "{\"cmd\":\"session.list\",\"all\":true}");
	list = cJSON_GetObjectItem(reply, "sessions");
	assert_int_equal(cJSON_GetArraySize(list), 2);
	assert_null(cJSON_GetObjectItem(list->child->next, "secret"));
	cJSON_Delete(reply);
	session = list_first(&mini->kvd.sessions, struct session, link);
	session->admin = false;
	client_call_fails(&first, "EPERM", "{\"cmd\":\"session.list\",\"all\":true}");
	assert_int_not_equal(session->epoch,
			     list_entry(session->link.next, struct session, link)->epoch);
	client_close(&first);
	client_close(&second);
}

/* Without a process to watch (another PID namespace, the simulation). */
static void session_without_pid_is_not_watched(void **state)
{
	struct mini *mini = *state;
	struct session_peer peer = {.pid = 0, .uid = 0, .fd = -1};
	struct session *session = NULL;

	assert_int_equal(session_new(&mini->kvd, &peer, NULL, &session), 0);
	assert_null(session->watch);
	assert_true(session_watch_alive(session->watch));
	assert_int_equal(session_greet(session, "sim\xff\n", NULL), 0);
	assert_string_equal(session->client, "sim??");
	session_end(session, "done");
	session_end(session, "done twice");
	mini_until_sessions(mini, 0);
}

struct storm {
	pthread_t target;
	atomic_bool over;
};

static void on_signal(int signum)
{
	(void)signum;
}

static void *storm_run(void *arg)
{
	struct storm *storm = arg;

	while (!atomic_load(&storm->over))
		pthread_kill(storm->target, SIGUSR1);
	return NULL;
}

/* A poll() that a signal interrupts tells nothing of the process. */
static void signals_end_no_session(void **state)
{
	const struct sigaction action = {.sa_handler = on_signal};
	struct storm storm = {.target = pthread_self()};
	struct pollfd same = {.events = POLLIN};
	struct mini *mini = *state;
	int interrupted = 0;
	bool alive = true;
	struct client client;
	struct session *session;
	pthread_t sender;
	uint64_t until;

	client_open(&client, mini);
	session = list_first(&mini->kvd.sessions, struct session, link);
	same.fd = session_watch_pidfd(session->watch);
	assert_true(same.fd >= 0);
	assert_int_equal(sigaction(SIGUSR1, &action, NULL), 0);
	assert_int_equal(pthread_create(&sender, NULL, storm_run, &storm), 0);
	until = clock_ns() + UINT64_C(10) * CLOCK_NS_PER_S;
	while (alive && interrupted < 20 && clock_ns() < until) {
		interrupted += poll(&same, 1, 0) < 0;
		alive = session_watch_alive(session->watch);
	}
	atomic_store(&storm.over, true);
	pthread_join(sender, NULL);
	assert_true(alive);
	if (!interrupted)
		skip(); /* one processor: no signal arrives in the call */
	close(same.fd);
	client_close(&client);
	mini_until_sessions(mini, 0);
}

static void idle_daemon_has_no_clock(void **state)
{
	struct mini *mini = *state;
	struct client client;

	assert_null(mini->kvd.session_clock);
	client_open(&client, mini);
	assert_non_null(mini->kvd.session_clock);
	client_close(&client);
	mini_until_sessions(mini, 0);
	assert_null(mini->kvd.session_clock);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(engine_killed_is_detected_within_2s),
		CASE(engine_killed_while_its_child_keeps_the_socket),
		CASE(engine_stopped_keeps_its_session),
		CASE(memory_removed_ends_the_session),
		CASE(statm_of_another_kind_is_refused),
		CASE(client_dead_before_accept_gets_no_session),
		CASE(client_reported_dead_gets_no_session),
		CASE(hello_has_identity_and_page),
		CASE(page_outlives_the_session_until_all_has_drained),
		CASE(sessions_are_listed_to_their_user),
		CASE(session_without_pid_is_not_watched),
		CASE(signals_end_no_session),
		CASE(idle_daemon_has_no_clock),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
