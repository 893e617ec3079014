/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd's client object: find the socket, connect, greet, end, come back.
 *
 * The greeting brings three things that later calls stand on: the session's
 * status page, the daemon's pid, and its limits. The pid that counts is the one
 * the kernel put on the reply (SCM_CREDENTIALS of the process that wrote it), so
 * neither a lying message nor socket activation can point us at another process.
 * The pidfd is opened before the connection is looked at once more: if it still
 * stands, the daemon had not ended, so its number cannot have been given to
 * another process, and the pidfd is the daemon's.
 *
 * Reconnecting makes a session like the first one, then registers what is on
 * record: regions first (each keeps a duplicate of its fd), then the pools made
 * of them. Handles keep their addresses; rooms and transfers of the old session
 * keep its page and end there.
 */
#include "proto/client.h"

#include <dirent.h>
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#define RUN_DIR "/run/kvd"
#define TIMEOUT_MS 10000
#define MAX_PENDING 4096u
#define MAX_QUEUED_BYTES (8u << 20)

bool client_blocks(const struct kvd_call *call)
{
	return !call || !call->on_done;
}

int client_enter(struct kvd_client *client, bool blocks)
{
	if (client->owner != getpid())
		return client_fail(client, KVD_E_FORKED,
				   "this client belongs to process %d: open one of your own",
				   (int)client->owner);
	if (blocks && client->in_callback)
		return client_fail(client, KVD_E_STATE,
				   "blocking calls are not possible in a callback");
	return 0;
}

/* ---- the socket's path ----------------------------------------------------- */

static int path_fits(char *path, size_t bytes, struct kvd_error *why, const char *dir,
		     const char *name, const char *suffix)
{
	int n = snprintf(path, bytes, "%s%s%s", dir, name, suffix);

	if (n >= 0 && (size_t)n < bytes && (size_t)n < CLIENT_PATH_MAX)
		return 0;
	client_error_set(why, KVD_E_TOOBIG, "socket path: over %u bytes", CLIENT_PATH_MAX - 1);
	return -KVD_E_TOOBIG;
}

/* The only *.sock of the directory. */
static int path_only(const char *dir, char *name, size_t bytes, struct kvd_error *why)
{
	DIR *d = opendir(dir);
	struct dirent *e;
	unsigned int found = 0;
	size_t len;

	if (!d) {
		client_error_set(why, errno == EACCES ? KVD_E_PERM : KVD_E_NODAEMON,
				 "no daemon found: %s: %s", dir, strerror(errno));
		return -why->code;
	}
	while ((e = readdir(d))) {
		len = strlen(e->d_name);
		if (len <= 5 || len >= bytes || strcmp(e->d_name + len - 5, ".sock"))
			continue;
		memcpy(name, e->d_name, len + 1);
		found++;
	}
	closedir(d);
	if (found == 1)
		return 0;
	client_error_set(why, KVD_E_NODAEMON,
			 found ? "%u sockets in %s: name one with KVD_SOCKET" :
				 "no daemon found: %u sockets in %s; is one running?",
			 found, dir);
	return -KVD_E_NODAEMON;
}

int kvd_socket_find(const char *name, char *path, size_t path_bytes,
		    struct kvd_error *why)
{
	const char *env = getenv("KVD_SOCKET"), *run = getenv("KVD_RUN_DIR");
	char dir[CLIENT_PATH_MAX], file[CLIENT_PATH_MAX];
	struct kvd_error ignored;
	int r;

	why = why ? why : &ignored;
	if (env && *env)
		return path_fits(path, path_bytes, why, env, "", "");
	r = path_fits(dir, sizeof(dir), why, run && *run ? run : RUN_DIR, "/", "");
	if (r)
		return r;
	if (name)
		return path_fits(path, path_bytes, why, dir, name, ".sock");
	r = path_only(dir, file, sizeof(file), why);
	return r ? r : path_fits(path, path_bytes, why, dir, file, "");
}

/* ---- connect and greet ------------------------------------------------------ */

static int connect_failed(struct kvd_client *client, int no)
{
	switch (no) {
	case ENOENT:
		return client_fail(client, KVD_E_NODAEMON,
				   "no daemon: %s does not exist; is it running, under this "
				   "name?",
				   client->path);
	case ECONNREFUSED:
		return client_fail(client, KVD_E_NODAEMON,
				   "no daemon: nobody listens on %s (left by one that ended?)",
				   client->path);
	case EACCES:
	case EPERM:
		return client_fail(client, KVD_E_PERM,
				   "%s: permission denied for uid %u; be in the socket's group",
				   client->path, (unsigned int)geteuid());
	case ETIMEDOUT:
		return client_fail(client, KVD_E_NOREPLY, "%s: the daemon accepts nobody",
				   client->path);
	default:
		return client_fail(client, KVD_E_NODAEMON, "%s: %s", client->path,
				   strerror(no));
	}
}

static int conn_connect(struct kvd_client *client, uint64_t until)
{
	struct sockaddr_un addr = {.sun_family = AF_UNIX};
	const struct timespec pause = {.tv_nsec = 1000000};
	cleanup_close int fd = -1;
	int one = 1;

	memcpy(addr.sun_path, client->path, strlen(client->path) + 1);
	fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
	if (fd < 0)
		return client_fail(client, KVD_E_IO, "socket: %s", strerror(errno));
	/* before connect: the kernel then puts the writer on every message */
	if (setsockopt(fd, SOL_SOCKET, SO_PASSCRED, &one, sizeof(one)) < 0)
		return client_fail(client, KVD_E_IO, "SO_PASSCRED: %s", strerror(errno));
	/* EAGAIN: the backlog is full; there is no event for its end */
	while (connect(fd, (struct sockaddr *)&addr, sizeof(addr)) < 0) {
		if (errno == EINTR || (errno == EAGAIN && client_now_ns() < until))
			nanosleep(&pause, NULL);
		else
			return connect_failed(client, errno == EAGAIN ? ETIMEDOUT : errno);
	}
	client->conn.fd = mem_steal_fd(&fd);
	client->conn.sender = 0;
	return 0;
}

static void info_str(const cJSON *reply, const char *name, char *out, size_t bytes)
{
	const char *s = client_get_str(reply, name);

	snprintf(out, bytes, "%s", s ? s : "");
}

/* A pidfd of the daemon, or -1 when its process is not in our PID namespace. */
static int daemon_pidfd(struct kvd_client *client)
{
	struct pollfd p = {.fd = client->conn.fd, .events = POLLRDHUP};
	pid_t pid = client->conn.sender;
	cleanup_close int pidfd = -1;

	if (pid <= 0)
		return -1;
	pidfd = (int)syscall(SYS_pidfd_open, pid, 0);
	if (pidfd < 0 || (poll(&p, 1, 0) > 0 && p.revents & (POLLRDHUP | POLLHUP)))
		return -1;
	return mem_steal_fd(&pidfd);
}

static int hello_finish(struct client_request *req, int result, const cJSON *reply)
{
	struct kvd_client *client = req->client;
	struct client_conn *conn = &client->conn;
	struct kvd_daemon_info *info = &client->info;
	const cJSON *status = cJSON_GetObjectItemCaseSensitive(reply, "status");
	uint64_t slots = 0, bytes = 0;
	const char *why = NULL;
	int r, pidfd;

	if (result)
		return result;
	info_str(reply, "daemon", info->daemon, sizeof(info->daemon));
	info_str(reply, "name", info->name, sizeof(info->name));
	info_str(reply, "instance", info->instance, sizeof(info->instance));
	info_str(reply, "endpoint", info->endpoint, sizeof(info->endpoint));
	info->pid = conn->sender;
	if (!client_get_u64(reply, "session", &info->session) ||
	    !client_get_u64(reply, "epoch", &info->epoch) ||
	    !client_get_u64(status, "slots", &slots) || slots > UINT32_MAX ||
	    !client_get_u64(status, "bytes", &bytes) || !conn->in_fd_count)
		return client_fail(client, KVD_E_PROTO,
				   "the hello reply lacks session, epoch or status page");
	pidfd = daemon_pidfd(client);
	r = client_map_new(conn->in_fds[0], (size_t)bytes, (uint32_t)slots, pidfd,
			   &client->map, &why);
	if (r) {
		mem_closep(&pidfd);
		return client_fail(client, -r, "the status page: %s", why ? why : "no memory");
	}
	info->slots = (uint32_t)slots;
	client->serial++;
	return 0;
}

/* A new session: connection, page, info. The old map's reference is dropped. */
static int client_greet(struct kvd_client *client, int timeout_ms)
{
	uint64_t until = client_now_ns() + (uint64_t)timeout_ms * 1000000u;
	struct kvd_call call = {.timeout_ms = timeout_ms};
	struct client_op op;
	int r, off = 0;

	client_map_unref(client->map);
	client->map = NULL;
	r = conn_connect(client, until);
	if (r)
		return r;
	client_op_begin(client, &op, "hello");
	client_text_int(&op.text, "proto", 1);
	client_text_str(&op.text, "client", client->name);
	if (*client->role)
		client_text_str(&op.text, "role", client->role);
	op.finish = hello_finish;
	r = client_op_run(client, &op, &call);
	if (r) {
		struct kvd_error error = client->error;

		client_conn_lost(client, false, "hello was refused");
		client->error = error;
		return r;
	}
	setsockopt(client->conn.fd, SOL_SOCKET, SO_PASSCRED, &off, sizeof(off));
	return 0;
}

static int options_take(struct kvd_client *client, const struct kvd_options *o)
{
	static const struct kvd_options none;

	o = o ? o : &none;
	client->timeout_ms = o->timeout_ms > 0 ? o->timeout_ms : TIMEOUT_MS;
	client->max_pending = o->max_pending ? o->max_pending : MAX_PENDING;
	client->max_queued_bytes = o->max_queued_bytes ? o->max_queued_bytes : MAX_QUEUED_BYTES;
	snprintf(client->name, sizeof(client->name), "%s", o->client ? o->client : "libkvd");
	snprintf(client->role, sizeof(client->role), "%s", o->role ? o->role : "");
	if (!o->socket)
		return kvd_socket_find(o->name, client->path, sizeof(client->path),
				       &client->error);
	return path_fits(client->path, sizeof(client->path), &client->error, o->socket, "", "");
}

int kvd_open(const struct kvd_options *options, struct kvd_client **client_p)
{
	struct kvd_client *client = mem_zalloc(sizeof(*client));
	int r;

	*client_p = NULL;
	if (!client) {
		client_error_set(client_error_thread(), KVD_E_NOMEM, "out of memory");
		return -KVD_E_NOMEM;
	}
	client->owner = getpid();
	client_conn_init(&client->conn);
	for (int i = 0; i < CLIENT_KINDS; i++)
		list_init(&client->objects[i]);
	r = options_take(client, options);
	if (!r)
		r = client_greet(client, client->timeout_ms);
	if (r) {
		*client_error_thread() = client->error;
		kvd_close(client);
		return r;
	}
	*client_p = client;
	return 0;
}

int kvd_close(struct kvd_client *client)
{
	struct client_object *object;

	if (!client)
		return 0;
	if (client->in_callback)
		return client_fail(client, KVD_E_STATE, "kvd_close in a callback");
	client_conn_fini(client);
	/* transfers and rooms before the pools and regions they name */
	for (int i = CLIENT_KINDS - 1; i >= 0; i--)
		while ((object = list_first(&client->objects[i], struct client_object, link))) {
			list_remove(&object->link);
			object->fini(object);
		}
	client_map_unref(client->map);
	mem_free(client);
	return 0;
}

static int client_again(struct kvd_client *client, uint64_t until)
{
	struct client_object *object;
	int r = 0;

	for (int kind = CLIENT_REGION; kind <= CLIENT_POOL; kind++)
		list_foreach(object, &client->objects[kind], link) {
			int64_t left = (int64_t)(until - client_now_ns()) / 1000000;

			if (client_object_phase(object) != CLIENT_READY)
				continue;
			if (left <= 0)
				return client_fail(client, KVD_E_NOREPLY, "registering again: "
									  "out of time");
			r = kind == CLIENT_REGION ?
				    client_region_again((struct kvd_region *)object, (int)left) :
				    client_pool_again((struct kvd_pool *)object, (int)left);
			if (r)
				return r;
		}
	return 0;
}

int kvd_reconnect(struct kvd_client *client, int timeout_ms)
{
	struct kvd_error error;
	uint64_t until;
	int r = client_enter(client, true);

	if (r)
		return r;
	if (timeout_ms <= 0)
		timeout_ms = client->timeout_ms;
	until = client_now_ns() + (uint64_t)timeout_ms * 1000000u;
	if (client->conn.fd >= 0)
		client_conn_lost(client, false, "kvd_reconnect() was called");
	r = client_greet(client, timeout_ms);
	if (!r)
		r = client_again(client, until);
	if (r && client->conn.fd >= 0) {
		error = client->error;
		client_conn_lost(client, false, "registering again failed");
		client->error = error;
	}
	return r;
}

const struct kvd_daemon_info *kvd_daemon(const struct kvd_client *client)
{
	return &client->info;
}
