/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A keeper's process, and the way to it. It accepts, and a child of its own serves
 * each connection, so that ends live and die apart. A child reads one command after
 * the other: those that concern memory or the puppet's process it does itself, the
 * others it passes on, with the descriptor of the memory where one belongs to them.
 * When the driver goes, the child ends, and with it the puppet and the memory.
 */
#include "tests/conform/keeper.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <poll.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "tests/conform/message.h"
#include "tests/conform/store.h"

#define EXIT_POLL_MS 5

struct keeper {
	int driver, puppet;
	pid_t pid; /* 0: it is gone */
	int status;
	struct store stores[PUPPET_MEMS]; /* kind 0 with fd -1: none */
};

int puppet_spawn(const char *transport, pid_t *pid_p, int *sock_p)
{
	int pair[2];
	char fd_word[16];

	if (socketpair(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0, pair) < 0)
		return err_raise_errno(errno, "socketpair");
	snprintf(fd_word, sizeof(fd_word), "%d", pair[1]);
	*pid_p = fork();
	if (*pid_p == 0) {
		fcntl(pair[1], F_SETFD, 0);
		execl("/proc/self/exe", "conform", "--puppet", transport, fd_word, NULL);
		_exit(127);
	}
	close(pair[1]);
	*sock_p = pair[0];
	return 0;
}

/* ---- commands ---- */

/* Is it gone, now? */
static bool reap(struct keeper *keeper, int flags)
{
	if (keeper->pid && waitpid(keeper->pid, &keeper->status, flags) == keeper->pid)
		keeper->pid = 0;
	return keeper->pid == 0;
}

static bool driver_is_gone(const struct keeper *keeper, int wait_ms)
{
	struct pollfd poll_fd = {.fd = keeper->driver, .events = POLLRDHUP};

	return poll(&poll_fd, 1, wait_ms) > 0;
}

static void do_exit(struct keeper *keeper, struct reply *reply)
{
	const struct cmd cmd = {.type = CMD_EXIT};

	if (!send_all(keeper->puppet, &cmd, sizeof(cmd), -1))
		reply->result = -EPIPE;
	while (!reap(keeper, WNOHANG) && !driver_is_gone(keeper, EXIT_POLL_MS))
		continue;
	reply->v[0] = (uint64_t)keeper->status;
}

/* So many bytes at each offset; NULL: the memory is gone. */
static uint8_t *samples(const struct store *store, uint64_t each, const uint64_t *offsets,
			size_t count)
{
	uint8_t *out = malloc(each * count + 1);

	for (size_t i = 0; out && i < count; i++) {
		if (store_read(store, offsets[i], out + i * each, each))
			continue;
		free(out);
		out = NULL;
	}
	return out;
}

/* What concerns the memory; false: the command is none of these. */
static bool do_store(struct keeper *keeper, const struct cmd *cmd, const void *blob,
		     struct reply *reply, void **out_p)
{
	struct store *store = &keeper->stores[cmd->a[0] % PUPPET_MEMS];
	bool ok = true;

	switch (cmd->type) {
	case KEEP_MAKE:
		reply->result = store_init(store, (enum memory_kind)cmd->a[1], cmd->a[2]);
		return true;
	case KEEP_READ:
		*out_p = malloc(cmd->a[2] + 1);
		ok = *out_p && store_read(store, cmd->a[1], *out_p, cmd->a[2]);
		reply->blob_len = ok ? (uint32_t)cmd->a[2] : 0;
		break;
	case KEEP_SAMPLES:
		*out_p =
			samples(store, cmd->a[1], blob, cmd->blob_len / sizeof(uint64_t));
		ok = *out_p != NULL;
		reply->blob_len =
			ok ? (uint32_t)(cmd->blob_len / sizeof(uint64_t) * cmd->a[1]) : 0;
		break;
	case KEEP_WRITE:
		ok = store_write(store, cmd->a[1], blob, cmd->blob_len);
		break;
	case KEEP_CUT:
		ok = store_cut(store, cmd->a[1]);
		break;
	case KEEP_OWNER_KILL:
		store_owner_kill(store);
		break;
	case KEEP_END:
		store_fini(store);
		break;
	default:
		return false;
	}
	reply->result = ok ? 0 : errno ? -errno : -EIO;
	return true;
}

static bool do_process(struct keeper *keeper, const struct cmd *cmd, struct reply *reply)
{
	if (cmd->type == KEEP_EXIT) {
		do_exit(keeper, reply);
		return true;
	}
	if (cmd->type != KEEP_SIGNAL)
		return false;
	if (keeper->pid)
		kill(keeper->pid, (int)cmd->a[0]);
	if (cmd->a[0] == SIGKILL)
		reap(keeper, 0);
	return true;
}

/* The puppet's own: it may need the memory's descriptor, or make one. */
static bool pass_on(struct keeper *keeper, struct cmd *cmd, const void *blob,
		    struct reply *reply, void **out_p)
{
	struct store *store = &keeper->stores[cmd->a[0] % PUPPET_MEMS];
	int fd = -1;

	if (cmd->type == CMD_MEM_VM) {
		cmd->a[1] = (uint64_t)store->owner;
		cmd->a[2] = store->address;
	}
	if (!send_all(keeper->puppet, cmd, sizeof(*cmd),
		      cmd->type == CMD_MEM_FD ? store->fd : -1) ||
	    !send_all(keeper->puppet, blob, cmd->blob_len, -1) ||
	    !recv_all(keeper->puppet, reply, sizeof(*reply), &fd) ||
	    !recv_blob(keeper->puppet, reply->blob_len, out_p))
		return false;
	if (cmd->type == CMD_MEM_LINEAR && fd >= 0)
		store->fd = fd;
	else if (fd >= 0)
		close(fd);
	return true;
}

static bool serve_one(struct keeper *keeper)
{
	void *blob = NULL, *out = NULL;
	struct reply reply = {0};
	struct cmd cmd;
	int fd = -1;
	bool ok;

	if (!recv_all(keeper->driver, &cmd, sizeof(cmd), &fd) ||
	    !recv_blob(keeper->driver, cmd.blob_len, &blob))
		return false;
	errno = 0;
	ok = do_store(keeper, &cmd, blob, &reply, &out) ||
	     do_process(keeper, &cmd, &reply) ||
	     pass_on(keeper, &cmd, blob, &reply, &out);
	ok = ok && send_all(keeper->driver, &reply, sizeof(reply), -1) &&
	     send_all(keeper->driver, out, reply.blob_len, -1);
	free(blob);
	free(out);
	return ok;
}

static int serve(const char *transport, int driver)
{
	static struct keeper keeper;
	int one = 1;

	signal(SIGCHLD, SIG_DFL);
	prctl(PR_SET_PDEATHSIG, SIGKILL);
	setsockopt(driver, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	keeper.driver = driver;
	for (size_t i = 0; i < PUPPET_MEMS; i++)
		keeper.stores[i].fd = keeper.stores[i].owner_sock = -1;
	if (puppet_spawn(transport, &keeper.pid, &keeper.puppet) < 0)
		return 3;
	while (serve_one(&keeper))
		continue;
	if (keeper.pid)
		kill(keeper.pid, SIGKILL);
	reap(&keeper, 0);
	for (size_t i = 0; i < PUPPET_MEMS; i++)
		store_fini(&keeper.stores[i]);
	return 0;
}

/* ---- the way there ---- */

static int address_of(const char *where, struct sockaddr_in *address_p)
{
	char host[32];
	unsigned int port;

	*address_p = (struct sockaddr_in){.sin_family = AF_INET};
	if (sscanf(where, "%31[0-9.]:%u", host, &port) != 2 || port > UINT16_MAX ||
	    inet_pton(AF_INET, host, &address_p->sin_addr) != 1)
		return err_raise(ERR_INVAL, "'%s' is no ADDRESS:PORT", where);
	address_p->sin_port = htons((uint16_t)port);
	return 0;
}

int keeper_dial(const char *where, int *sock_p)
{
	struct sockaddr_in address;
	int one = 1, sock, r = address_of(where, &address);

	if (r < 0)
		return err_pass(r);
	sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (sock < 0 || connect(sock, (struct sockaddr *)&address, sizeof(address)) < 0) {
		r = err_raise_errno(errno, "keeper at %s", where);
		if (sock >= 0)
			close(sock);
		return r;
	}
	setsockopt(sock, IPPROTO_TCP, TCP_NODELAY, &one, sizeof(one));
	*sock_p = sock;
	return 0;
}

static int keeper_listen(const char *where)
{
	struct sockaddr_in address;
	int one = 1, sock;

	if (address_of(where, &address) < 0)
		return -1;
	sock = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
	if (sock < 0)
		return -1;
	setsockopt(sock, SOL_SOCKET, SO_REUSEADDR, &one, sizeof(one));
	if (bind(sock, (struct sockaddr *)&address, sizeof(address)) < 0 ||
	    listen(sock, 8) < 0) {
		err_raise_errno(errno, "keeper: %s", where);
		close(sock);
		return -1;
	}
	return sock;
}

/* Port 0 has become one. */
static void say_where(int sock)
{
	struct sockaddr_in address = {0};
	socklen_t len = sizeof(address);
	char host[INET_ADDRSTRLEN] = "?";

	getsockname(sock, (struct sockaddr *)&address, &len);
	inet_ntop(AF_INET, &address.sin_addr, host, sizeof(host));
	printf("listening on %s:%u\n", host, ntohs(address.sin_port));
	fflush(stdout);
}

int keeper_main(const char *transport, const char *where)
{
	int sock = keeper_listen(where);

	if (sock < 0) {
		fprintf(stderr, "conform: %s\n", err_last()->text);
		return 2;
	}
	signal(SIGCHLD, SIG_IGN); /* nobody waits for them */
	signal(SIGPIPE, SIG_IGN);
	say_where(sock);
	for (;;) {
		int driver = accept4(sock, NULL, NULL, SOCK_CLOEXEC);

		if (driver < 0)
			continue;
		if (fork() == 0) {
			close(sock);
			_exit(serve(transport, driver));
		}
		close(driver);
	}
}
