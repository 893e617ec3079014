/* SPDX-License-Identifier: Apache-2.0 */
/*
 * libkvd's client object: find the socket, open, close. A client is created once and
 * outlives any number of sessions (client_session.c). It owns the handles; each belongs
 * to the session that created it, and memory is registered again in the next one.
 * kvd_close() therefore needs no daemon: it closes the connection, which ends the session
 * there, and frees every remaining handle.
 */
#include "lib/client.h"

#include <dirent.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#define RUN_DIR "/run/kvd"
#define TIMEOUT_MS 10000
#define MAX_PENDING 4096u
#define MAX_QUEUED_BYTES (8u << 20)

static void on_nothing(void *arg, int result, const struct kvd_reply *reply)
{
	(void)arg;
	(void)result;
	(void)reply;
}

const struct kvd_call client_never_waits = {.on_done = on_nothing};

bool client_blocks(const struct kvd_call *call)
{
	return !call || (!call->on_done && !call->post);
}

int client_enter(struct kvd_client *client, bool blocks)
{
	if (client->owner != getpid())
		return client_fail(
			client, KVD_E_FORKED,
			"client: belongs to process %d; open one in this process",
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
	client_error_set(why, KVD_E_TOOBIG, "socket path: longer than %u bytes",
			 CLIENT_PATH_MAX - 1);
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
			 found ? "%u sockets in %s: name one with KVD_NAME"
			       : "no daemon found: %u sockets in %s; is one running?",
			 found, dir);
	return -KVD_E_NODAEMON;
}

int kvd_socket_find(const char *name, char *path, size_t path_bytes,
		    struct kvd_error *why)
{
	const char *env = getenv("KVD_SOCKET"), *run = getenv("KVD_RUN_DIR");
	const char *instance = getenv("KVD_NAME");
	char dir[CLIENT_PATH_MAX], file[CLIENT_PATH_MAX];
	struct kvd_error ignored;
	int r;

	why = why ? why : &ignored;
	if (!name && env && *env)
		return path_fits(path, path_bytes, why, env, "", "");
	r = path_fits(dir, sizeof(dir), why, run && *run ? run : RUN_DIR, "/", "");
	if (r)
		return r;
	if (!name && instance && *instance)
		name = instance;
	if (name)
		return path_fits(path, path_bytes, why, dir, name, ".sock");
	r = path_only(dir, file, sizeof(file), why);
	return r ? r : path_fits(path, path_bytes, why, dir, file, "");
}

/* ---- open and close -------------------------------------------------------------- */

static int options_take(struct kvd_client *client, const struct kvd_options *o)
{
	static const struct kvd_options none;

	o = o ? o : &none;
	client->timeout_ms = o->timeout_ms > 0 ? o->timeout_ms : TIMEOUT_MS;
	client->max_pending = o->max_pending ? o->max_pending : MAX_PENDING;
	client->again.manual = o->manual_reconnect;
	client->max_queued_bytes =
		o->max_queued_bytes ? o->max_queued_bytes : MAX_QUEUED_BYTES;
	snprintf(client->name, sizeof(client->name), "%s",
		 o->client ? o->client : "libkvd");
	snprintf(client->role, sizeof(client->role), "%s", o->role ? o->role : "");
	if (!o->socket)
		return kvd_socket_find(o->name, client->path, sizeof(client->path),
				       &client->error);
	return path_fits(client->path, sizeof(client->path), &client->error, o->socket,
			 "", "");
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
		r = client_session_open(client, client->timeout_ms);
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
		return client_fail(client, KVD_E_STATE,
				   "kvd_close: not allowed in a callback");
	client_conn_fini(client);
	/* transfers and rooms before the pools and regions they name */
	for (int i = CLIENT_KINDS - 1; i >= 0; i--)
		while ((object = list_first(&client->objects[i], struct client_object,
					    link))) {
			list_remove(&object->link);
			object->fini(object);
		}
	client_ring_lost(client);
	client_map_unref(client->map);
	cJSON_Delete(client->notifs_kept);
	mem_free(client);
	return 0;
}

const struct kvd_daemon_info *kvd_daemon(const struct kvd_client *client)
{
	return &client->info;
}
