/* SPDX-License-Identifier: Apache-2.0 */
/*
 * An etcd with what strangers put there, servers that are none, and the ways in: names,
 * several endpoints, TLS, a user.
 */
#include <arpa/inet.h>
#include <fcntl.h>
#include <setjmp.h>
#include <signal.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/cluster/etcd_impl.h"
#include "daemon/gate/sandbox.h"
#include "tests/lib/directory_tests.h"
#include "tests/lib/etcd_rig.h"
#include "tests/lib/tmp.h"

static struct place the_place;

/* Member 0 says it, member 1 hears it. */
static struct seen *hello(struct etcd_rig *rig, struct said *said, const char *record)
{
	struct seen *seen = seen_new(rig->rig.member(&rig->rig, 1), "g", true);

	the_place = directory_place("g", "w", 0);
	said_init(said);
	assert_int_equal(rig->members[1]->ops->publish(rig->rig.member(&rig->rig, 0),
						       &said->publication, &the_place,
						       record, "l"),
			 0);
	directory_until(&rig->rig, 3 * DIRECTORY_SOON_NS,
			seen_has(seen, &the_place, record, "l") && seen->synced);
	return seen;
}

static void goodbye(struct etcd_rig *rig, struct seen *seen)
{
	rig->members[1]->ops->unwatch(&seen->watch);
	seen_free(seen);
	etcd_rig_free(rig);
}

/* ---- foreign content ---- */

static void foreign_keys_are_counted(void **state)
{
	static const char *const bad[][2] = {
		{"/kvd/groups/g/w/0.0.0", "r"},
		{"/kvd/groups/g/w/0.0.0.65536", "r"},
		{"/kvd/groups/g/w/0.0.0.-1", "r"},
		{"/kvd/groups/g/%41/0.0.0.0", "r"},
		{"/kvd/groups/g//0.0.0.0", "r"},
		{"/kvd/groups/g/", "r"},
		{"/kvd/groups/g/w/0.0.0.1", "$(printf '\\377')"},
		{"/kvd/groups/g/w/0.0.0.2", "$(head -c 4097 /dev/zero | tr '\\0' x)"},
		{"/kvd/groups/g/w/0.0.0.3", "$(head -c 100000 /dev/zero | tr '\\0' x)"},
		{"/kvd/load/g/w/0.0.0.0", "$(head -c 1025 /dev/zero | tr '\\0' x)"},
		{"/kvd/groups/g/$(head -c 3000 /dev/zero | tr '\\0' k)", "r"},
	};
	struct etcd_rig *rig = etcd_rig_new(60);
	struct place without = directory_place("g", "free", 0);
	struct directory_state now;
	char out[256], id[32];
	struct seen *seen = NULL, *late;
	static struct said said;

	(void)state;
	assert_int_equal(etcd_ctl(rig->server, out, sizeof(out), "lease grant 600"), 0);
	assert_int_equal(sscanf(out, "lease %31s granted", id), 1);
	/* those that are there before the watch, and those that come in it */
	for (int during = 0; during < 2; during++) {
		if (during)
			seen = hello(rig, &said, "r");
		for (size_t i = 0; i < ARRAY_LEN(bad); i++)
			assert_int_equal(etcd_ctl(rig->server, NULL, 0,
						  "put --lease=%s -- \"%s\" \"%s\"", id,
						  bad[i][0], bad[i][1]),
					 0);
		assert_int_equal(etcd_ctl(rig->server, NULL, 0,
					  "put /kvd/groups/g/free/0.0.0.0 no-lease"),
				 0);
	}
	/* the load that was bad before may have been ours when it was read */
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			etcd_rig_state(rig, 1).refused >= 2 * (ARRAY_LEN(bad) + 1) - 1);
	assert_int_equal(seen->there, 1);
	assert_null(seen_find(seen, &without));
	/* our good load was overwritten by a bad one: it is not known any more */
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			seen_has(seen, &the_place, "r", NULL));
	assert_int_equal(rig->members[0]->ops->update(&said.publication, "r2", "l2"), 0);
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			seen_has(seen, &the_place, "r2", "l2"));
	now = etcd_rig_state(rig, 1);
	assert_true(now.up);
	assert_int_equal(now.reconnects, 0);
	late = seen_new(rig->rig.member(&rig->rig, 2), "g", true);
	directory_until(&rig->rig, DIRECTORY_SOON_NS, late->synced);
	assert_int_equal(late->there, 1);
	rig->members[2]->ops->unwatch(&late->watch);
	seen_free(late);
	goodbye(rig, seen);
}

/* Put by etcdctl's transactions, many at a time. */
static void put_many(struct etcd_rig *rig, const char *id, unsigned int count,
		     const char *format)
{
	char path[64], word[96];
	FILE *file;
	int fd;

	tmp_path(path, sizeof(path), "keys-XXXXXX");
	fd = mkstemp(path);
	for (unsigned int begin = 0; begin < count; begin += 120) {
		assert_int_equal(ftruncate(fd, 0), 0);
		file = fopen(path, "w");
		assert_non_null(file);
		fputs("\n", file);
		for (unsigned int i = begin; i < begin + 120 && i < count; i++) {
			snprintf(word, sizeof(word), format, i);
			fprintf(file, "put --lease=%s %s r\n", id, word);
		}
		fputs("\n\n", file);
		fclose(file);
		assert_int_equal(etcd_ctl(rig->server, NULL, 0, "txn < %s", path), 0);
	}
	close(fd);
	unlink(path);
}

static void many_keys_are_read_in_small_turns(void **state)
{
	enum { FOREIGN = 6000, GOOD = 3000 };
	struct etcd_rig *rig = etcd_rig_new(60);
	const struct loop_stats *stats = loop_stats(rig->loop);
	char out[256], id[32];
	uint64_t begin_ns;
	struct seen *seen;
	static struct said said;

	(void)state;
	assert_int_equal(etcd_ctl(rig->server, out, sizeof(out), "lease grant 600"), 0);
	assert_int_equal(sscanf(out, "lease %31s granted", id), 1);
	put_many(rig, id, FOREIGN, "/kvd/groups/g/foreign%05u");
	put_many(rig, id, GOOD, "/kvd/groups/g/w%05u/0.0.0.0");
	begin_ns = loop_clock_ns(rig->loop);
	seen = hello(rig, &said, "r");
	assert_int_equal(seen->there, GOOD + 1);
	assert_true(etcd_rig_state(rig, 1).refused >= FOREIGN);
	print_message(
		"%u foreign and %u good keys: %ju ms, %ju of %ju turns over 200 us, "
		"longest %ju us\n",
		FOREIGN, GOOD,
		(uintmax_t)((loop_clock_ns(rig->loop) - begin_ns) / LOOP_NS_PER_MS),
		(uintmax_t)stats->over, (uintmax_t)stats->busy.count,
		(uintmax_t)(stats->cpu.max / 1000));
	assert_int_equal(etcd_ctl(rig->server, NULL, 0, "del --prefix /kvd/groups/g/w0"),
			 0);
	directory_until(&rig->rig, DIRECTORY_SOON_NS, seen->there == 1);
	goodbye(rig, seen);
}

/* ---- servers that are none ---- */

static int listener(char port[8])
{
	struct sockaddr_in addr = {.sin_family = AF_INET};
	socklen_t len = sizeof(addr);
	int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);

	addr.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
	assert_int_equal(bind(fd, (struct sockaddr *)&addr, sizeof(addr)), 0);
	assert_int_equal(listen(fd, 16), 0);
	assert_int_equal(getsockname(fd, (struct sockaddr *)&addr, &len), 0);
	snprintf(port, 8, "%u", ntohs(addr.sin_port));
	return fd;
}

static void server_not_etcd_is_named(void **state)
{
	static const struct {
		const char *says, *why;
	} cases[] = {
		{"HTTP/1.1 404 Not Found\r\nContent-Length: 9\r\n\r\nNot Found",
		 "gateway"},
		{"HTTP/1.1 404 Not Found\r\nContent-Length: 22\r\n\r\n"
		 "{\"detail\":\"Not Found\"}",
		 "HTTP 404"},
		{"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}", "is it etcd"},
		{"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n\r\n", "truncated response"},
		{"HTTP/1.1 302 Found\r\nLocation: http://127.0.0.1:1/\r\nContent-Length: "
		 "0\r\n\r\n",
		 "truncated response"},
		{"SSH-2.0-OpenSSH_9.2\r\n", "etcd 127.0.0.1"},
		{"\xff\xfe\x00", "etcd 127.0.0.1"},
		{"", "etcd 127.0.0.1"},
		{"HTTP/1.1 200 OK\r\n\r\n{\"kvs\":[", "truncated response"},
	};
	struct cluster_url url = {.count = 1, .prefix = "/kvd"};
	struct etcd_args args = {.url = &url, .lease_s = 60};
	char drop[4096];

	(void)state;
	strcpy(url.endpoints[0].host, "127.0.0.1");
	url.endpoints[0].literal = true;
	assert_int_equal(loop_new(&args.loop), 0);
	for (size_t i = 0; i < ARRAY_LEN(cases); i++) {
		unsigned int answered = 0;
		struct directory *directory;
		struct directory_state now;
		char port[8];
		int fd = listener(port);

		memcpy(url.endpoints[0].port, port, sizeof(url.endpoints[0].port));
		assert_int_equal(etcd_new(&args, &directory), 0);
		while (answered < 3) {
			int conn = accept(fd, NULL, NULL);

			loop_turn(args.loop, 5 * LOOP_NS_PER_MS);
			if (conn < 0)
				continue;
			while (recv(conn, drop, sizeof(drop), MSG_DONTWAIT) < 0)
				loop_turn(args.loop, LOOP_NS_PER_MS);
			(void)send(conn, cases[i].says, strlen(cases[i].says),
				   MSG_NOSIGNAL);
			shutdown(conn, SHUT_WR);
			for (int turns = 0; turns < 5; turns++)
				loop_turn(args.loop, LOOP_NS_PER_MS);
			close(conn);
			answered++;
		}
		directory->ops->state(directory, &now);
		assert_false(now.up);
		assert_int_not_equal(now.why.code, ERR_OK);
		if (cases[i].why && !strstr(now.why.text, cases[i].why))
			print_error("%zu: %s\n", i, now.why.text);
		if (cases[i].why)
			assert_non_null(strstr(now.why.text, cases[i].why));
		directory->ops->free(directory);
		close(fd);
	}
	loop_free(args.loop);
}

struct lack {
	struct watch watch; /* its first member */
	char record[8], load[8];
	unsigned int synced;
};

static void lack_on_entry(struct watch *watch, const struct place *place,
			  const char *record, const char *load)
{
	struct lack *lack = container_of(watch, struct lack, watch);

	(void)place;
	snprintf(lack->record, sizeof(lack->record), "%s", record ? record : "gone");
	snprintf(lack->load, sizeof(lack->load), "%s", load ? load : "");
}

static void lack_on_synced(struct watch *watch)
{
	container_of(watch, struct lack, watch)->synced++;
}

/* Knows no lease that it has granted, and goes back in a watch. */
struct liar {
	struct loop *loop;
	int fd;
	const char *ttl;
	unsigned int keeps, grants, ranges;
	int streams[64];
	unsigned int stream_count;
	uint64_t watch_ns; /* it takes so long to create watches */
	uint64_t due_ns;   /* those of the latest stream; 0: they are */
	char late[512];
};

static void liar_text(struct liar *liar, const char *asked, char body[512])
{
	static const char range[] =
		"{\"header\":{\"revision\":\"5\"},\"kvs\":[{\"value\":"
		"\"MDEyMzQ1Njc4OWFiY2RlZjAxMjM0NTY3ODlhYmNkZWY=\"}]}";
	static const char member[] = "\"watch_id\":\"";
	const char *id = strstr(asked, member);

	if (strstr(asked, "/v3/lease/keepalive")) {
		snprintf(body, 512, "{\"result\":{\"ID\":\"7\",\"TTL\":\"%s\"}}",
			 liar->ttl);
		liar->keeps++;
	} else if (strstr(asked, "/v3/lease/")) {
		snprintf(body, 512, "{\"ID\":\"7\",\"TTL\":\"%s\"}", liar->ttl);
		liar->grants++;
	} else if (strstr(asked, "/v3/watch")) {
		snprintf(body, 512,
			 "{\"result\":{\"header\":{\"revision\":\"%u\"},\"watch_id\":"
			 "\"%d\",\"created\":true}}",
			 liar->watch_ns ? 5 : 1, id ? atoi(id + strlen(member)) : 0);
	} else if (strstr(asked, "/v3/kv/txn")) {
		snprintf(body, 512,
			 "{\"error\":\"requested lease not found\",\"code\":5}");
	} else {
		snprintf(body, 512, "%s", range);
		liar->ranges++;
	}
}

/* Answers one request, if somebody connects. */
static void liar_turn(struct liar *liar)
{
	char text[4096], body[512], head[128];
	int conn = accept(liar->fd, NULL, NULL);
	bool stream;
	ssize_t len;

	loop_turn(liar->loop, 2 * LOOP_NS_PER_MS);
	if (liar->due_ns && loop_clock_ns(liar->loop) >= liar->due_ns) {
		liar->due_ns = 0;
		(void)send(liar->streams[liar->stream_count - 1], liar->late,
			   strlen(liar->late), MSG_NOSIGNAL);
	}
	if (conn < 0)
		return;
	while ((len = recv(conn, text, sizeof(text) - 1, MSG_DONTWAIT)) < 0)
		loop_turn(liar->loop, LOOP_NS_PER_MS);
	text[len] = '\0';
	stream = strstr(text, "/v3/watch");
	liar_text(liar, text, body);
	snprintf(head, sizeof(head), "HTTP/1.1 %s\r\nConnection: close\r\n\r\n",
		 strstr(body, "error") ? "404 Not Found" : "200 OK");
	(void)send(conn, head, strlen(head), MSG_NOSIGNAL);
	if (stream && liar->watch_ns) {
		liar->due_ns = loop_clock_ns(liar->loop) + liar->watch_ns;
		memcpy(liar->late, body, sizeof(liar->late));
	} else {
		(void)send(conn, body, strlen(body), MSG_NOSIGNAL);
	}
	if (stream) {
		assert_true(liar->stream_count < ARRAY_LEN(liar->streams));
		liar->streams[liar->stream_count++] = conn;
		return;
	}
	shutdown(conn, SHUT_WR);
	for (int turns = 0; turns < 5; turns++)
		loop_turn(liar->loop, LOOP_NS_PER_MS);
	close(conn);
}

static struct directory *liar_new(struct liar *liar)
{
	struct cluster_url url = {.count = 1, .prefix = "/kvd"};
	struct etcd_args args = {.url = &url, .lease_s = 60};
	struct directory_state now = {.up = false};
	struct directory *directory;
	char port[8];

	assert_int_equal(loop_new(&liar->loop), 0);
	args.loop = liar->loop;
	liar->fd = listener(port);
	strcpy(url.endpoints[0].host, "127.0.0.1");
	memcpy(url.endpoints[0].port, port, sizeof(url.endpoints[0].port));
	url.endpoints[0].literal = true;
	assert_int_equal(etcd_new(&args, &directory), 0);
	for (int turns = 0; turns < 1000 && !now.up; turns++) {
		liar_turn(liar);
		directory->ops->state(directory, &now);
	}
	assert_true(now.up);
	return directory;
}

static void liar_free(struct liar *liar, struct directory *directory)
{
	while (liar->stream_count)
		close(liar->streams[--liar->stream_count]);
	close(liar->fd);
	directory->ops->free(directory);
	loop_free(liar->loop);
}

/* A lease's time that is none must not make a daemon renew it without a pause. */
static void lease_of_any_time_is_renewed_with_pauses(void **state)
{
	/* the second is no nanoseconds, the third some, when it overflows */
	static const char *const ttls[] = {"-1", "36028797018963968", "18446744074",
					   "18446744073709551615", "0"};

	(void)state;
	for (size_t i = 0; i < ARRAY_LEN(ttls); i++) {
		struct liar liar = {.ttl = ttls[i]};
		struct directory *directory = liar_new(&liar);

		for (int turns = 0; turns < 100; turns++)
			liar_turn(&liar);
		assert_int_equal(liar.keeps, 0);
		liar_free(&liar, directory);
	}
}

static void etcd_contradicting_itself_is_queried_with_pauses(void **state)
{
	struct liar liar = {.ttl = "60"};
	struct directory *directory = liar_new(&liar);
	struct place place = directory_place("g", "w", 0);
	struct seen *seen = seen_new(directory, "g", true);
	struct said said;
	uint64_t end_ns;

	(void)state;
	said_init(&said);
	assert_int_equal(
		directory->ops->publish(directory, &said.publication, &place, "r", NULL),
		0);
	end_ns = loop_clock_ns(liar.loop) + 2 * LOOP_NS_PER_S;
	liar.grants = liar.ranges = 0;
	while (loop_clock_ns(liar.loop) < end_ns)
		liar_turn(&liar);
	print_message("%u leases, %u ranges, %u streams\n", liar.grants, liar.ranges,
		      liar.stream_count);
	assert_in_range(liar.grants, 1, 10);
	assert_in_range(liar.ranges, 2, 10);
	directory->ops->unwatch(&seen->watch);
	seen_free(seen);
	liar_free(&liar, directory);
}

/* It is given time, twice as much with each try; until then nobody is told that this is
 * all of the group. */
static void watch_slow_is_awaited(void **state)
{
	struct liar liar = {.ttl = "60", .watch_ns = 700 * LOOP_NS_PER_MS};
	struct directory *directory = liar_new(&liar);
	struct lack seen = {
		.watch = {.on_entry = lack_on_entry, .on_synced = lack_on_synced}};
	uint64_t end_ns = loop_clock_ns(liar.loop) + 5 * LOOP_NS_PER_S;

	(void)state;
	list_init(&seen.watch.link);
	assert_int_equal(directory->ops->watch(directory, &seen.watch, "g", false), 0);
	while (!seen.synced && loop_clock_ns(liar.loop) < end_ns) {
		liar_turn(&liar);
		assert_true(!seen.synced || (liar.stream_count && !liar.due_ns));
	}
	assert_int_equal(seen.synced, 1);
	assert_in_range(liar.stream_count, 2, 3);
	for (unsigned int n = liar.stream_count, turns = 0; turns < 400; turns++) {
		liar_turn(&liar); /* and then left alone */
		assert_int_equal(liar.stream_count, n);
	}
	directory->ops->unwatch(&seen.watch);
	liar_free(&liar, directory);
}

/* ---- ways in ---- */

static void second_endpoint_and_names_are_used(void **state)
{
	struct etcd_rig *rig = etcd_rig_new(4);
	char port[8], url[128];
	struct seen *seen;
	static struct said said;
	int fd = listener(port);

	(void)state;
	close(fd); /* nobody is there */
	snprintf(url, sizeof(url),
		 "etcd://127.0.0.1:%s,nowhere.invalid:1,localhost:%s/kvd", port,
		 rig->server->port);
	assert_int_equal(cluster_url_parse(url, &rig->url), 0);
	seen = hello(rig, &said, "r");
	goodbye(rig, seen);
}

/* A daemon that is killed and started again has its place at once. */
static void lease_file_frees_places_after_a_crash(void **state)
{
	struct etcd_rig *rig = etcd_rig_new(60);
	struct seen *seen;
	static struct said said;
	uint64_t begin_ns;
	char path[64];

	(void)state;
	tmp_path(path, sizeof(path), "lease-XXXXXX");
	close(mkstemp(path));
	rig->args.lease_file = path;
	rig->rig.member(&rig->rig, 0); /* only this one may have it */
	rig->args.lease_file = NULL;
	seen = hello(rig, &said, "r");
	rig->rig.crash(&rig->rig, 0);
	rig->args.lease_file = path;
	rig->rig.member(&rig->rig, 0);
	begin_ns = loop_clock_ns(rig->loop);
	said_init(&said);
	assert_int_equal(rig->members[1]->ops->publish(rig->members[0], &said.publication,
						       &the_place, "r2", NULL),
			 0);
	directory_until(&rig->rig, DIRECTORY_SOON_NS, said.done);
	assert_int_equal(said.err.code, ERR_OK);
	assert_true(loop_clock_ns(rig->loop) - begin_ns < 10 * LOOP_NS_PER_S);
	rig->rig.leave(&rig->rig, 0);
	assert_int_equal(access(path, F_OK), -1);
	goodbye(rig, seen);
}

static void file_write(const char *dir, const char *name, const char *text, char path[96])
{
	FILE *file;

	snprintf(path, 96, "%s/%s", dir, name);
	file = fopen(path, "w");
	assert_non_null(file);
	fputs(text, file);
	assert_int_equal(fchmod(fileno(file), 0600), 0);
	fclose(file);
}

static void token_of_user_is_requested_and_renewed(void **state)
{
	struct directory *directory;
	struct directory_state now;
	struct etcd_server server;
	char good[96], bad[96];
	struct etcd_rig *rig;
	struct seen *seen;
	static struct said said;

	(void)state;
	etcd_server_need();
	etcd_server_init(&server);
	etcd_server_start(&server);
	file_write(server.dir, "good", "kvd:pass:word\n", good);
	file_write(server.dir, "bad", "kvd:other\n", bad);
	assert_int_equal(etcd_ctl(&server, NULL, 0,
				  "user add root:root && "
				  "for c in 'user grant-role root root' 'role add kvd' "
				  "'role grant-permission --prefix kvd readwrite /kvd/' "
				  "'user add kvd:pass:word' 'user grant-role kvd kvd' "
				  "'auth enable'; do ETCDCTL_API=3 etcdctl "
				  "--endpoints=127.0.0.1:%s $c || exit 1; done",
				  server.port),
			 0);
	server.login = "root:root";
	rig = etcd_rig_on(&server, 4);
	/* without a user, with the wrong one */
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			etcd_rig_state(rig, 2).why.code == ERR_AUTH);
	now = etcd_rig_state(rig, 2);
	assert_non_null(strstr(now.why.text, "cluster_user_file"));
	rig->rig.leave(&rig->rig, 2);
	rig->args.user_file = bad;
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			etcd_rig_state(rig, 2).why.code == ERR_AUTH);
	rig->rig.leave(&rig->rig, 2);
	rig->args.user_file = good;
	assert_int_equal(chmod(good, 0604), 0);
	assert_true(etcd_new(&rig->args, &directory) < 0);
	assert_non_null(strstr(err_last()->text, "0604"));
	err_clear();
	assert_int_equal(chmod(good, 0640), 0);
	seen = hello(rig, &said, "r");
	/* its tokens are only in etcd's memory */
	etcd_server_stop(&server, SIGKILL);
	directory_until(&rig->rig, DIRECTORY_SOON_NS, !etcd_rig_up(rig, 0));
	etcd_server_start(&server);
	assert_int_equal(rig->members[0]->ops->update(&said.publication, "r2", NULL), 0);
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			seen_has(seen, &the_place, "r2", "l") && etcd_rig_up(rig, 0));
	/* and where its role does not reach it says so */
	rig->rig.leave(&rig->rig, 2);
	strcpy(rig->url.prefix, "/other");
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			etcd_rig_state(rig, 2).why.code == ERR_AUTH);
	goodbye(rig, seen);
	etcd_server_free(&server);
}

static void tls_checks_both_sides(void **state)
{
	char ca[96], cert[96], key[96], foreign[96];
	struct directory *directory;
	struct etcd_server server, other;
	struct etcd_rig *rig;
	struct seen *seen;
	static struct said said;

	(void)state;
	etcd_server_need();
	etcd_server_init(&server);
	etcd_server_init(&other);
	if (!etcd_server_certify(&server) || !etcd_server_certify(&other)) {
		etcd_server_free(&server);
		etcd_server_free(&other);
		print_message("needs openssl (the program)\n");
		skip();
	}
	etcd_server_start(&server);
	rig = etcd_rig_on(&server, 60);
	assert_true(etcd_new(&rig->args, &directory) < 0);
	assert_non_null(strstr(err_last()->text, "cluster_tls_ca"));
	snprintf(ca, sizeof(ca), "%s/ca.pem", server.dir);
	snprintf(foreign, sizeof(foreign), "%s/ca.pem", other.dir);
	snprintf(cert, sizeof(cert), "%s/client.pem", server.dir);
	snprintf(key, sizeof(key), "%s/client.key", server.dir);
	rig->args.ca = ca;
	rig->args.cert = cert;
	assert_true(etcd_new(&rig->args, &directory) < 0);
	assert_non_null(strstr(err_last()->text, "cluster_tls_key"));
	rig->args.key = key;
	assert_int_equal(chmod(key, 0644), 0);
	assert_true(etcd_new(&rig->args, &directory) < 0);
	assert_non_null(strstr(err_last()->text, "cluster_tls_key"));
	assert_non_null(strstr(err_last()->text, "0644"));
	assert_int_equal(chmod(key, 0640), 0);
	rig->args.key = "/nowhere/key";
	assert_true(etcd_new(&rig->args, &directory) < 0);
	assert_non_null(strstr(err_last()->text, "/nowhere/key"));
	err_clear();
	/* another CA's, and no certificate of ours */
	rig->args.cert = rig->args.key = NULL;
	rig->rig.member(&rig->rig, 0);
	rig->args.ca = foreign;
	rig->rig.member(&rig->rig, 1);
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			etcd_rig_state(rig, 0).why.code == ERR_IO &&
				etcd_rig_state(rig, 1).why.code == ERR_IO);
	assert_non_null(strstr(etcd_rig_state(rig, 1).why.text, "cert"));
	rig->rig.leave(&rig->rig, 0);
	rig->rig.leave(&rig->rig, 1);
	rig->args.ca = ca;
	rig->args.cert = cert;
	rig->args.key = key;
	seen = hello(rig, &said, "r");
	print_message("TLS: %ju of %ju turns over 200 us, longest %ju us\n",
		      (uintmax_t)loop_stats(rig->loop)->over,
		      (uintmax_t)loop_stats(rig->loop)->busy.count,
		      (uintmax_t)(loop_stats(rig->loop)->cpu.max / 1000));
	goodbye(rig, seen);
	etcd_server_free(&server);
	etcd_server_free(&other);
}

/* What the daemon's main process may call and open is enough, names and TLS included. */
static void sandboxed_daemon_reaches_etcd(void **state)
{
	char ca[96], cert[96], key[96], url[64];
	struct etcd_server server;
	struct etcd_rig *rig;
	static struct said said;
	int status;
	pid_t pid;

	(void)state;
	etcd_server_need();
	etcd_server_init(&server);
	if (!etcd_server_certify(&server)) {
		etcd_server_free(&server);
		print_message("needs openssl (the program)\n");
		skip();
	}
	etcd_server_start(&server);
	pid = fork();
	assert_true(pid >= 0);
	if (pid == 0) {
		etcd_rig_disown();
		rig = etcd_rig_on(&server, 60);
		snprintf(url, sizeof(url), "etcds://localhost:%s", server.port);
		assert_int_equal(cluster_url_parse(url, &rig->url), 0);
		snprintf(ca, sizeof(ca), "%s/ca.pem", server.dir);
		snprintf(cert, sizeof(cert), "%s/client.pem", server.dir);
		snprintf(key, sizeof(key), "%s/client.key", server.dir);
		rig->args.ca = ca;
		rig->args.cert = cert;
		rig->args.key = key;
		assert_int_equal(sandbox_prepare(true), 0);
		rig->rig.member(&rig->rig, 0);
		assert_int_equal(sandbox_enter(SANDBOX_MAIN), 0);
		goodbye(rig, hello(rig, &said, "r"));
		_exit(0);
	}
	assert_int_equal(waitpid(pid, &status, 0), pid);
	assert_int_equal(status, 0);
	etcd_server_free(&server);
}

/* ---- no memory ---- */

/* Tried until it is there: at most one of the tries fails. */
#define LACK_TRY(call)                                         \
	do {                                                   \
		if ((call) == 0)                               \
			break;                                 \
		assert_int_equal(err_last()->code, ERR_NOMEM); \
		err_clear();                                   \
		assert_int_equal(call, 0);                     \
	} while (0)

/* A member's whole life, in which the n-th allocation fails. False: it has not so many.
 */
static bool lack_at(struct etcd_rig *rig, uint64_t n)
{
	struct lack lack = {
		.watch = {.on_entry = lack_on_entry, .on_synced = lack_on_synced}};
	struct place place = directory_place("g", "w", 0);
	int64_t live = mem_live();
	struct directory *d;
	static struct said said;
	bool failed;

	list_init(&lack.watch.link);
	said_init(&said);
	mem_fail_at(n);
	LACK_TRY(etcd_new(&rig->args, &rig->members[0]));
	d = rig->members[0];
	LACK_TRY(d->ops->watch(d, &lack.watch, "g", true));
	LACK_TRY(d->ops->publish(d, &said.publication, &place, "r1", "l1"));
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			said.done && lack.synced && !strcmp(lack.record, "r1") &&
				!strcmp(lack.load, "l1"));
	assert_int_equal(said.err.code, ERR_OK);
	LACK_TRY(d->ops->update(&said.publication, "r2", "l2"));
	directory_until(&rig->rig, DIRECTORY_SOON_NS,
			!strcmp(lack.record, "r2") && !strcmp(lack.load, "l2"));
	d->ops->withdraw(&said.publication);
	directory_until(&rig->rig, DIRECTORY_SOON_NS, !strcmp(lack.record, "gone"));
	d->ops->unwatch(&lack.watch);
	failed = mem_count() >= n;
	rig->rig.leave(&rig->rig, 0);
	mem_fail_at(0);
	assert_int_equal(mem_live(), live);
	return failed;
}

/* Beside each other, since what failed is tried again after a second. */
static void allocation_failed_is_recovered(void **state)
{
	enum { CHILDREN = 16 };
	struct etcd_rig *rig = etcd_rig_new(60);
	pid_t children[CHILDREN];
	unsigned int bad = 0;
	int status;

	(void)state;
	for (unsigned int i = 0; i < CHILDREN; i++) {
		children[i] = fork();
		assert_true(children[i] >= 0);
		if (children[i] == 0) {
			uint64_t n = i + 1;

			log_set_level(LOG_LEVEL_ERROR);

			etcd_rig_disown();
			rig = etcd_rig_on(rig->server, 60);
			snprintf(rig->url.prefix, sizeof(rig->url.prefix), "/c%u", i);
			lack_at(rig, UINT32_MAX); /* what is made once */
			while (lack_at(rig, n))
				n += CHILDREN;
			if (i == 0)
				print_message("%ju allocations failed\n", (uintmax_t)n);
			_exit(n < 30); /* there are more than that */
		}
	}
	for (unsigned int i = 0; i < CHILDREN; i++) {
		assert_int_equal(waitpid(children[i], &status, 0), children[i]);
		bad += status != 0;
	}
	assert_int_equal(bad, 0);
	etcd_rig_free(rig);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(foreign_keys_are_counted),
		cmocka_unit_test(many_keys_are_read_in_small_turns),
		cmocka_unit_test(server_not_etcd_is_named),
		cmocka_unit_test(lease_of_any_time_is_renewed_with_pauses),
		cmocka_unit_test(etcd_contradicting_itself_is_queried_with_pauses),
		cmocka_unit_test(watch_slow_is_awaited),
		cmocka_unit_test(second_endpoint_and_names_are_used),
		cmocka_unit_test(lease_file_frees_places_after_a_crash),
		cmocka_unit_test(token_of_user_is_requested_and_renewed),
		cmocka_unit_test(tls_checks_both_sides),
		cmocka_unit_test(sandboxed_daemon_reaches_etcd),
		cmocka_unit_test(allocation_failed_is_recovered),
	};

	return cmocka_run_group_tests_name("etcd hostile", tests, etcd_rig_begin,
					   etcd_rig_end);
}
