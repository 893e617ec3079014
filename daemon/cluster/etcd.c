/* SPDX-License-Identifier: Apache-2.0 */
/*
 * The etcd directory as a whole: its options, its state, its one step.
 *
 * Any event changes the desired or the known state, and schedules the step, which then
 * does all possible work: the lease, then publications, then subscriptions, then readers.
 * So each part only records its needs, and none calls another in the middle of its work.
 */
#include "daemon/cluster/etcd.h"

#include <assert.h>
#include <errno.h>
#include <fcntl.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "daemon/base/err.h"
#include "daemon/cluster/etcd_impl.h"
#include "proto/json.h"

#define PAUSE_FIRST_NS (500 * LOOP_NS_PER_MS)
#define PAUSE_MOST_NS (8 * LOOP_NS_PER_S)
#define PATIENCE_MIN_NS LOOP_NS_PER_S
#define PATIENCE_MAX_NS (5 * LOOP_NS_PER_S)
#define USER_FILE_MAX 1024u

void etcd_kick(struct etcd *e)
{
	loop_defer(e->loop, &e->step);
}

void etcd_kick_later(struct etcd *e)
{
	if (!loop_timer_running(&e->again))
		loop_timer_start(&e->again, ETCD_AGAIN_NS);
}

static void etcd_on_again(struct loop_timer *timer)
{
	etcd_kick(container_of(timer, struct etcd, again));
}

static void etcd_step(struct loop_defer *defer)
{
	struct etcd *e = container_of(defer, struct etcd, step);

	etcd_lease_step(e);
	etcd_own_step(e);
	etcd_group_step(e);
	etcd_follow_step(e);
}

uint64_t etcd_jitter(struct etcd *e, uint64_t pause_ns)
{
	return pause_ns / 2 + loop_random_u64(e->loop) % (pause_ns / 2 + 1);
}

uint64_t etcd_pause(struct etcd *e, unsigned int failures)
{
	uint64_t most_ns = e->lease_s * LOOP_NS_PER_S / 2, pause_ns = PAUSE_FIRST_NS;

	if (most_ns > PAUSE_MOST_NS)
		most_ns = PAUSE_MOST_NS;
	while (failures-- > 1 && pause_ns < most_ns)
		pause_ns *= 2;
	return etcd_jitter(e, pause_ns < most_ns ? pause_ns : most_ns);
}

void etcd_state_check(struct etcd *e, const struct err *why)
{
	bool up = etcd_link_up(&e->link) && e->lease.id && !e->refused_puts;
	bool changed = up != e->state.up;

	if (up)
		e->state.why = (struct err){.code = ERR_OK};
	else if (why)
		e->state.why = *why;
	assert(up || e->state.why.code != ERR_OK);
	if (!changed)
		return;
	e->state.up = up;
	e->state.since_ns = loop_now_ns(e->loop);
	if (e->directory.on_state)
		e->directory.on_state(e->directory.arg);
}

void etcd_refusal(const struct etcd_message *answer, const char *what, struct err *err_p)
{
	enum { EXHAUSTED = 8, DENIED = 7, UNAUTHENTICATED = 16 };
	const char *text = answer->error[0] ? answer->error : "(no message)";
	bool login = strstr(text, "user name is empty") ||
		     strstr(text, "authentication failed");

	if (strstr(text, "space exceeded"))
		err_set(err_p, ERR_LIMIT,
			"%.120s: etcd is full: \"%.150s\"; compact and defragment it, "
			"then run etcdctl alarm disarm, or raise --quota-backend-bytes",
			what, text);
	else if (login || answer->error_code == DENIED ||
		 answer->error_code == UNAUTHENTICATED)
		err_set(err_p, ERR_AUTH,
			"%.120s: etcd error \"%.150s\"; see cluster_user_file and the "
			"role of that user",
			what, text);
	else if (answer->error_code == EXHAUSTED)
		err_set(err_p, ERR_LIMIT, "%.200s: etcd error \"%s\"", what, text);
	else
		err_set(err_p, ERR_IO, "%.200s: etcd error \"%s\"", what, text);
}

/* ---- operations ---- */

static void etcd_op_state(const struct directory *directory,
			  struct directory_state *state_p)
{
	*state_p = container_of(directory, struct etcd, directory)->state;
}

static void etcd_free_secret(char **secret)
{
	if (*secret)
		explicit_bzero(*secret, strlen(*secret));
	mem_free(mem_steal(*secret));
}

static void etcd_free_all(struct etcd *e)
{
	mem_free(e->ca);
	mem_free(e->cert);
	mem_free(e->key);
	mem_free(e->lease_file);
	etcd_free_secret(&e->user);
	etcd_free_secret(&e->password);
	explicit_bzero(e->link.token, sizeof(e->link.token));
	mem_free(e);
}

static void etcd_op_free(struct directory *directory)
{
	struct etcd *e = etcd_of(directory);

	e->directory.on_state = NULL;
	etcd_follow_fini(e);
	etcd_groups_fini(e);
	etcd_owns_fini(e);
	etcd_lease_fini(e);
	etcd_request_cancel(&e->link.request);
	etcd_link_fini(e);
	etcd_curl_fini(e);
	loop_timer_stop(&e->again);
	loop_defer_cancel(&e->step);
	etcd_free_all(e);
}

static const struct directory_ops etcd_ops = {
	.name = "etcd",
	.publish = etcd_own_publish,
	.update = etcd_own_update,
	.withdraw = etcd_own_withdraw,
	.watch = etcd_group_watch,
	.unwatch = etcd_group_unwatch,
	.state = etcd_op_state,
	.free = etcd_op_free,
};

/* ---- options ---- */

static int etcd_secret_check(const char *option, const char *path, int fd)
{
	struct stat st;

	if (fstat(fd, &st) < 0)
		return err_raise(ERR_CONFIG, "%s: %s: %s", option, path, strerror(errno));
	if (st.st_mode & S_IRWXO)
		return err_raise(ERR_CONFIG,
				 "%s: %s: mode %04o: must not be accessible by others; "
				 "chmod o=",
				 option, path, (unsigned int)st.st_mode & 07777);
	return 0;
}

/* Read now: libcurl reads it when it connects, with less detail in its error. */
static int etcd_file(const char *option, const char *path, bool secret, char **copy_p)
{
	cleanup_close int fd = -1;
	int r;

	if (!path || !*path)
		return 0;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	if (fd < 0)
		return err_raise(ERR_CONFIG, "%s: %s: %s", option, path, strerror(errno));
	r = secret ? etcd_secret_check(option, path, fd) : 0;
	if (r < 0)
		return err_pass(r);
	*copy_p = mem_strdup(path);
	return *copy_p ? 0 : err_pass(-ENOMEM);
}

static int etcd_user(struct etcd *e, const char *path)
{
	char line[USER_FILE_MAX];
	cleanup_close int fd = -1;
	ssize_t len;
	char *colon;
	int r = 0;

	if (!path || !*path)
		return 0;
	fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
	r = fd < 0 ? 0 : etcd_secret_check("cluster_user_file", path, fd);
	if (r < 0)
		return err_pass(r);
	len = fd < 0 ? -1 : read(fd, line, sizeof(line) - 1);
	if (len < 0)
		return err_raise(ERR_CONFIG, "cluster_user_file: %s: %s", path,
				 strerror(errno));
	line[len] = '\0';
	line[strcspn(line, "\r\n")] = '\0';
	colon = strchr(line, ':');
	if (!colon || colon == line || !colon[1] || !json_utf8(line, strlen(line))) {
		r = err_raise(
			ERR_CONFIG,
			"cluster_user_file: %s: its first line must be USER:PASSWORD "
			"(limit %u bytes of UTF-8)",
			path, USER_FILE_MAX - 2);
	} else {
		*colon = '\0';
		e->user = mem_strdup(line);
		e->password = e->user ? mem_strdup(colon + 1) : NULL;
		r = e->password ? 0 : err_pass(-ENOMEM);
	}
	explicit_bzero(line, sizeof(line));
	return r;
}

static int etcd_options(struct etcd *e, const struct etcd_args *args)
{
	int r;

	if (args->lease_s < ETCD_LEASE_MIN_S || args->lease_s > ETCD_LEASE_MAX_S)
		return err_raise(ERR_CONFIG,
				 "cluster_lease: %u s is out of range (%u "
				 "to %u s)",
				 args->lease_s, ETCD_LEASE_MIN_S, ETCD_LEASE_MAX_S);
	e->lease_s = args->lease_s;
	e->patience_ns = e->lease_s * LOOP_NS_PER_S / 3;
	if (e->patience_ns < PATIENCE_MIN_NS)
		e->patience_ns = PATIENCE_MIN_NS;
	if (e->patience_ns > PATIENCE_MAX_NS)
		e->patience_ns = PATIENCE_MAX_NS;
	r = etcd_file("cluster_tls_ca", args->ca, false, &e->ca);
	if (r == 0)
		r = etcd_file("cluster_tls_cert", args->cert, false, &e->cert);
	if (r == 0)
		r = etcd_file("cluster_tls_key", args->key, true, &e->key);
	if (r == 0)
		r = etcd_user(e, args->user_file);
	if (r < 0)
		return err_pass(r);
	if (args->lease_file && *args->lease_file) {
		e->lease_file = mem_strdup(args->lease_file);
		if (!e->lease_file)
			return err_pass(-ENOMEM);
	}
	if (e->url.tls && !e->ca)
		return err_raise(
			ERR_CONFIG,
			"cluster_tls_ca: etcds:// needs the CA of etcd's certificate (a "
			"PEM file)");
	if (!e->url.tls && (e->ca || e->cert || e->key))
		return err_raise(
			ERR_CONFIG,
			"cluster: etcd:// is without TLS; use etcds://, or leave "
			"cluster_tls_ca, cluster_tls_cert and cluster_tls_key empty");
	if (!e->cert != !e->key)
		return err_raise(ERR_CONFIG,
				 "%s: cluster_tls_cert and cluster_tls_key must be set "
				 "together",
				 e->cert ? "cluster_tls_key" : "cluster_tls_cert");
	return 0;
}

int etcd_check(const struct etcd_args *args)
{
	struct etcd *e = mem_zalloc(sizeof(*e));
	int r;

	if (!e)
		return err_pass(-ENOMEM);
	e->url = *args->url;
	r = etcd_lib_load(&e->lib);
	if (r == 0)
		r = etcd_options(e, args);
	etcd_free_all(e);
	return r < 0 ? err_pass(r) : 0;
}

int etcd_new(const struct etcd_args *args, struct directory **directory_p)
{
	struct etcd *e = mem_zalloc(sizeof(*e));
	int r;

	*directory_p = NULL;
	if (!e)
		return err_pass(-ENOMEM);
	e->directory.ops = &etcd_ops;
	e->loop = args->loop;
	e->url = *args->url;
	list_init(&e->owns);
	list_init(&e->due);
	list_init(&e->leaving);
	list_init(&e->groups);
	loop_defer_init(&e->step, etcd_step);
	loop_timer_init(&e->again, e->loop, etcd_on_again);
	e->state.since_ns = loop_now_ns(e->loop);
	err_set(&e->state.why, ERR_BUSY, "etcd: not connected yet");
	r = etcd_lib_load(&e->lib);
	if (r == 0)
		r = etcd_options(e, args);
	if (r == 0) {
		etcd_requests_init(e);
		etcd_follow_init(e);
		etcd_lease_init(e);
		r = etcd_link_init(e);
	}
	if (r < 0) {
		etcd_free_all(e);
		return err_pass(r);
	}
	loop_timer_start(&e->link.timer, 0);
	*directory_p = &e->directory;
	return 0;
}
