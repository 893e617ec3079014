/* SPDX-License-Identifier: Apache-2.0 */
/* link_keydir: created pairs, published keys, and directories that are not used. Then
 * links with both, without a hand-made file. */
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>
#include <zmq.h>

#include "daemon/base/clock.h"
#include "daemon/base/err.h"
#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/link/link_keydir.h"
#include "tests/lib/tmp.h"
#include "tests/lib/zmqnet.h"

#define MS LOOP_NS_PER_MS
#define a zmqnet_a
#define b zmqnet_b

static char root[64];

static void use_dir(struct config *config, const char *name, const char *dir)
{
	*config = (struct config){.insecure = false};
	snprintf(config->name, sizeof(config->name), "%s", name);
	snprintf(config->run_dir, sizeof(config->run_dir), "%s", root);
	snprintf(config->keys_dir, sizeof(config->keys_dir), "%s/%s", root, dir);
}

static int keydir_setup(void **state)
{
	(void)state;
	assert_non_null(mkdtemp(tmp_path(root, sizeof(root), "kvd-keydir-XXXXXX")));
	log_set_level(LOG_LEVEL_ERROR);
	return zmqnet_setup(state);
}

static int keydir_teardown(void **state)
{
	char command[100];

	snprintf(command, sizeof(command), "rm -rf %s", root);
	assert_int_equal(system(command), 0);
	return zmqnet_teardown(state);
}

static mode_t mode_of(const char *name)
{
	char path[200];
	struct stat st;

	snprintf(path, sizeof(path), "%s/%s", root, name);
	assert_int_equal(lstat(path, &st), 0);
	return st.st_mode & 07777;
}

/* ---- the pair ---- */

static void pair_is_made_once_and_kept(void **state)
{
	struct curve_keys first, second;
	struct link_keydir *dir;
	struct config config;
	char path[200], line[200] = "", want[200], user[LINK_USER_MAX];
	int fd;

	(void)state;
	use_dir(&config, "one", "keys");
	assert_int_equal(link_keydir_new(&config, &first, &dir), 0);
	assert_int_equal(mode_of("keys"), 0700);
	assert_int_equal(mode_of("keys/one.key"), 0600);
	assert_int_equal(mode_of("keys/one.pub"), 0644);
	snprintf(path, sizeof(path), "%s/keys/one.pub", root);
	fd = open(path, O_RDONLY | O_CLOEXEC);
	assert_true(read(fd, line, sizeof(line) - 1) > 0);
	close(fd);
	link_keydir_name("one", user);
	snprintf(want, sizeof(want), "%s %s\n", user, first.public_key);
	assert_string_equal(line, want);
	/* while it runs no other daemon of that name can use it */
	struct link_keydir *other;

	assert_true(link_keydir_new(&config, &second, &other) < 0);
	assert_int_equal(err_last()->code, ERR_BUSY);
	link_keydir_free(dir);
	assert_int_equal(link_keydir_new(&config, &second, &dir), 0);
	assert_memory_equal(&first, &second, sizeof(first));
	link_keydir_free(dir);
}

struct starter {
	pthread_t thread;
	struct config config;
	struct curve_keys keys;
	int r;
};

/* Two threads a name: a lock belongs to an open file. */
static void *start_one(void *arg)
{
	struct starter *starter = arg;
	struct link_keydir *dir;

	starter->r = link_keydir_new(&starter->config, &starter->keys, &dir);
	if (starter->r == 0)
		link_keydir_free(dir);
	return NULL;
}

static void key_pairs_created_at_once_are_one_each(void **state)
{
	struct starter starters[8];

	(void)state;
	for (unsigned int i = 0; i < 8; i++) {
		char name[8];

		snprintf(name, sizeof(name), "d%u", i / 2);
		use_dir(&starters[i].config, name, "keys");
		assert_int_equal(pthread_create(&starters[i].thread, NULL, start_one,
						&starters[i]),
				 0);
	}
	for (unsigned int i = 0; i < 8; i++)
		pthread_join(starters[i].thread, NULL);
	for (unsigned int i = 0; i < 8; i += 2) {
		struct starter *x = &starters[i], *y = &starters[i + 1];

		assert_true(x->r == 0 || y->r == 0);
		if (x->r == 0 && y->r == 0)
			assert_memory_equal(&x->keys, &y->keys, sizeof(x->keys));
		for (unsigned int k = 0; x->r == 0 && k < i; k++)
			assert_true(starters[k].r < 0 ||
				    memcmp(&starters[k].keys, &x->keys,
					   sizeof(x->keys)) != 0);
	}
}

static void key_directory_unusable_is_reported(void **state)
{
	struct curve_keys keys;
	struct link_keydir *dir = NULL;
	struct config config;
	char path[200];

	(void)state;
	use_dir(&config, "one", "none/keys");
	assert_true(link_keydir_new(&config, &keys, &dir) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_non_null(strstr(err_last()->text, "none/keys: No such file"));
	assert_non_null(strstr(err_last()->text, "keys_dir"));
	/* others may write it; a link; half a key */
	use_dir(&config, "one", "open");
	snprintf(path, sizeof(path), "%s/open", root);
	assert_int_equal(mkdir(path, 0700), 0);
	assert_int_equal(chmod(path, 0770), 0);
	assert_true(link_keydir_new(&config, &keys, &dir) < 0);
	assert_non_null(strstr(err_last()->text, "chmod go-w"));
	use_dir(&config, "one", "link");
	assert_int_equal(chmod(path, 0700), 0);
	snprintf(path, sizeof(path), "%s/link", root);
	assert_int_equal(symlink("open", path), 0);
	assert_true(link_keydir_new(&config, &keys, &dir) < 0);
	use_dir(&config, "one", "open");
	snprintf(path, sizeof(path), "%s/open/one.key", root);
	close(open(path, O_WRONLY | O_CREAT | O_CLOEXEC, 0600));
	assert_true(link_keydir_new(&config, &keys, &dir) < 0);
	assert_non_null(strstr(err_last()->text, "40 Z85 characters"));
	assert_null(dir);
}

/* ---- published keys ---- */

struct names {
	char text[200];
};

static void on_name(void *arg, const char *name, const char *key)
{
	struct names *names = arg;

	assert_int_equal(strlen(key), CURVE_KEY_CHARS);
	strcat(names->text, name);
	strcat(names->text, " ");
}

static void show(struct link_keydir *dir, const struct curve_keys *keys, const char *name,
		 const char *host)
{
	char line[200];

	snprintf(line, sizeof(line), "%s %s %s", name, keys->public_key, host);
	link_keydir_show(dir, keys->public_key, line);
}

static void key_published_is_found_while_its_daemon_runs(void **state)
{
	struct curve_keys one, two;
	struct link_keydir *dir, *other;
	struct names names = {""};
	struct config config;
	char name[LINK_USER_MAX], key[41];

	(void)state;
	use_dir(&config, "one", "keys");
	assert_int_equal(link_keydir_new(&config, &one, &dir), 0);
	use_dir(&config, "two", "keys");
	assert_int_equal(link_keydir_new(&config, &two, &other), 0);
	show(dir, &one, "one", "127.0.0.1:1");
	assert_false(link_keydir_find(dir, two.public_key, name));
	show(other, &two, "two", "127.0.0.1:7 localhost:7");
	assert_true(link_keydir_find(dir, two.public_key, name));
	assert_string_equal(name, "two");
	assert_true(link_keydir_at(dir, "localhost", "7", key));
	assert_string_equal(key, two.public_key);
	assert_false(link_keydir_at(dir, "localhost", "8", key));
	assert_true(link_keydir_tells(dir, two.public_key, "127.0.0.1", "7"));
	assert_false(link_keydir_tells(dir, two.public_key, "127.0.0.1", "1"));
	link_keydir_each(dir, on_name, &names);
	assert_int_equal(strlen(names.text), strlen("one two "));
	assert_false(link_keydir_seen(other, two.public_key));
	link_keydir_free(other);
	assert_false(link_keydir_find(dir, two.public_key, name));
	assert_true(link_keydir_seen(dir, two.public_key));
	assert_false(link_keydir_find(dir, "no key", name));
	assert_false(link_keydir_find(NULL, two.public_key, name));
	link_keydir_free(dir);
}

/* An address that was found is read again after a second. */
static void address_of_an_ended_daemon_is_its_successors(void **state)
{
	const uint64_t end_ns = clock_ns() + UINT64_C(10000000000);
	struct link_keydir *dir, *other;
	struct curve_keys one, two;
	struct config config;
	char key[41];

	(void)state;
	use_dir(&config, "one", "keys");
	assert_int_equal(link_keydir_new(&config, &one, &dir), 0);
	use_dir(&config, "two", "keys");
	assert_int_equal(link_keydir_new(&config, &two, &other), 0);
	show(dir, &one, "one", "localhost:1");
	show(other, &two, "two", "localhost:7");
	assert_true(link_keydir_at(dir, "localhost", "7", key));
	link_keydir_free(other);
	while (link_keydir_at(dir, "localhost", "7", key))
		assert_true(clock_ns() < end_ns);
	use_dir(&config, "three", "keys");
	assert_int_equal(link_keydir_new(&config, &two, &other), 0);
	show(other, &two, "three", "localhost:7");
	assert_true(link_keydir_at(dir, "localhost", "7", key));
	assert_string_equal(key, two.public_key);
	link_keydir_free(other);
	link_keydir_free(dir);
}

/* That nobody has an address is known until a directory changes. */
static void address_of_nobody_is_searched_again_after_a_change(void **state)
{
	uint64_t end_ns;
	struct link_keydir *dir, *other;
	struct curve_keys one, two;
	struct config config;
	struct stat before;
	char key[41];

	(void)state;
	use_dir(&config, "one", "keys");
	assert_int_equal(link_keydir_new(&config, &one, &dir), 0);
	use_dir(&config, "two", "keys");
	assert_int_equal(link_keydir_new(&config, &two, &other), 0);
	show(dir, &one, "one", "localhost:1");
	assert_int_equal(stat(config.keys_dir, &before), 0);
	assert_false(link_keydir_at(dir, "localhost", "7", key));
	end_ns = clock_ns() + CLOCK_NS_PER_S / 10;
	while (clock_ns() < end_ns) /* the next change has another time */
		;
	assert_false(link_keydir_at(dir, "localhost", "7", key));
	show(other, &two, "two", "localhost:7");
	utimensat(AT_FDCWD, config.keys_dir,
		  (struct timespec[]){before.st_atim, before.st_mtim}, 0);
	assert_false(link_keydir_at(dir, "localhost", "7", key)); /* by the time */
	utimensat(AT_FDCWD, config.keys_dir, NULL, 0);
	assert_true(link_keydir_at(dir, "localhost", "7", key));
	assert_string_equal(key, two.public_key);
	link_keydir_free(other);
	link_keydir_free(dir);
}

/* No descriptor is left for the search. */
static void search_that_could_not_read_is_not_remembered(void **state)
{
	uint64_t end_ns = clock_ns() + CLOCK_NS_PER_S / 10;
	struct link_keydir *dir;
	struct curve_keys keys;
	struct rlimit few, old;
	struct config config;
	char key[41];
	bool found;

	(void)state;
	use_dir(&config, "one", "keys");
	assert_int_equal(link_keydir_new(&config, &keys, &dir), 0);
	show(dir, &keys, "one", "localhost:7");
	(void)link_keydir_at(dir, "localhost", "8", key);
	while (clock_ns() < end_ns) /* until the directory's time tells changes */
		;
	assert_int_equal(getrlimit(RLIMIT_NOFILE, &old), 0);
	few = (struct rlimit){.rlim_cur = 1, .rlim_max = old.rlim_max};
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &few), 0);
	found = link_keydir_at(dir, "localhost", "7", key);
	assert_int_equal(setrlimit(RLIMIT_NOFILE, &old), 0);
	assert_false(found);
	assert_true(link_keydir_at(dir, "localhost", "7", key));
	link_keydir_free(dir);
}

/* Its file stays when it is killed, and is worth nothing without its lock. */
static void key_of_a_killed_daemon_is_not_found(void **state)
{
	struct curve_keys one, two;
	struct link_keydir *dir, *other;
	struct config config;
	char name[LINK_USER_MAX], path[300], file[65];
	uint8_t bytes[32];
	int status, said[2];
	pid_t pid;

	(void)state;
	use_dir(&config, "one", "keys");
	assert_int_equal(link_keydir_new(&config, &one, &dir), 0);
	show(dir, &one, "one", "127.0.0.1:1");
	assert_int_equal(pipe2(said, O_CLOEXEC), 0);
	pid = fork();
	if (pid == 0) {
		use_dir(&config, "two", "keys");
		if (link_keydir_new(&config, &two, &other) == 0)
			show(other, &two, "two", "127.0.0.1:2");
		(void)!write(said[1], two.public_key, sizeof(two.public_key));
		pause();
		_exit(0);
	}
	assert_int_equal(read(said[0], two.public_key, sizeof(two.public_key)), 41);
	assert_true(link_keydir_find(dir, two.public_key, name));
	kill(pid, SIGKILL);
	waitpid(pid, &status, 0);
	assert_non_null(zmq_z85_decode(bytes, two.public_key));
	for (unsigned int i = 0; i < 32; i++)
		snprintf(file + 2 * i, 3, "%02x", bytes[i]);
	snprintf(path, sizeof(path), "%s/keys/%s", root, file);
	assert_int_equal(access(path, F_OK), 0);
	assert_false(link_keydir_find(dir, two.public_key, name));
	assert_int_equal(access(path, F_OK), -1);
	link_keydir_free(dir);
	close(said[0]);
	close(said[1]);
}

/* ---- links ---- */

static void listen_as(struct zmqnet_node *node, const char *name, const char *dir)
{
	struct config keys;

	use_dir(&keys, name, dir);
	node->config.insecure = false;
	memcpy(node->config.name, keys.name, sizeof(keys.name));
	memcpy(node->config.keys_dir, keys.keys_dir, sizeof(keys.keys_dir));
	zmqnet_listen(node);
}

static void links_of_one_user_find_each_other(void **state)
{
	char plain[LINK_ENDPOINT_MAX], name[LINK_ENDPOINT_MAX], user[LINK_USER_MAX];
	struct link_line *line, *back;
	struct curve_changes changes;

	(void)state;
	listen_as(&a, "ann", "keys");
	listen_as(&b, "ben", "keys");
	zmqnet_plain(&b, plain);
	assert_int_equal(a.link->ops->canonical(a.link, plain, name), 0);
	assert_string_equal(name, b.link->endpoint);
	line = zmqnet_dial(&a, plain);
	back = zmqnet_dial(&b, a.link->endpoint);
	zmqnet_wait(a.lines_up == 1 && b.lines_up == 1);
	assert_int_equal(zmqnet_send(&a, line, "from a"), 0);
	zmqnet_wait(b.frames == 1);
	link_keydir_name("ann", user);
	assert_string_equal(b.user, user);
	/* a reloaded list does not affect them */
	assert_int_equal(link_zmq_reload(b.link, "", true, &changes), 0);
	assert_int_equal(zmqnet_send(&a, line, "again"), 0);
	zmqnet_wait(b.frames == 2);
	assert_int_equal(link_zmq_stats(b.link)->revoked, 0);
	a.link->ops->hangup(line);
	b.link->ops->hangup(back);
}

static struct err trouble;

static void on_diagnosis(void *owner, void *line_owner, const struct err *why, bool final)
{
	(void)owner;
	(void)line_owner;
	if (final)
		trouble = *why;
}

static void link_of_other_directory_is_not_same_user(void **state)
{
	struct link_keys keys;
	char plain[LINK_ENDPOINT_MAX], want[300];
	struct link_line *line;

	(void)state;
	listen_as(&a, "ann", "keys");
	listen_as(&b, "ben", "others");
	a.link->ops->keys(a.link, &keys);
	a.link->on_diagnosis = on_diagnosis;
	assert_true(a.link->ops->dial(a.link, b.link->endpoint, &a, &line) < 0);
	assert_int_equal(err_last()->code, ERR_AUTH);
	assert_non_null(strstr(err_last()->text, strchr(b.link->endpoint, '#') + 1));
	snprintf(want, sizeof(want), "'%s' there", keys.line);
	assert_non_null(strstr(err_last()->text, want));
	/* its key may become known: it is probed, and not connected */
	trouble.code = ERR_OK;
	zmqnet_plain(&b, plain);
	line = zmqnet_dial(&a, plain);
	zmqnet_wait(trouble.code == ERR_AUTH);
	assert_non_null(strstr(trouble.text, "not known here"));
	assert_int_equal(b.frames + a.lines_up, 0);
	a.link->ops->hangup(line);
}

/* ---- keys that the directory knows later ---- */

static unsigned int looked_up;
static bool known;

/* It takes a turn's time. */
static bool vouch_knows(void *owner, const char *key)
{
	(void)owner;
	(void)key;
	if (known)
		poll(NULL, 0, 1);
	looked_up += known;
	return known;
}

static bool vouch_ask(void *owner, const char *key)
{
	(void)owner;
	(void)key;
	return true;
}

/* The directory has the keys of many daemons at once; a line ends before its turn. */
static void lines_whose_keys_arrive_connect_one_a_turn(void **state)
{
	static const struct link_vouch vouch = {.knows = vouch_knows, .ask = vouch_ask};
	struct link_line *lines[8];
	char endpoint[LINK_ENDPOINT_MAX], public_key[41], secret[41];
	unsigned int before, most = 0;

	(void)state;
	known = false;
	looked_up = 0;
	zmqnet_allow(false);
	zmqnet_use_curve(&a, 0);
	zmqnet_listen(&a);
	zmqnet_allow(true);
	zmqnet_use_curve(&b, 1);
	zmqnet_listen(&b);
	link_zmq_vouch(a.link, &vouch);
	for (unsigned int i = 0; i < ARRAY_LEN(lines) - 1; i++) {
		do {
			zmq_curve_keypair(public_key, secret);
		} while (*public_key == '#');
		snprintf(endpoint, sizeof(endpoint), "tcp://127.0.0.1:9#%s", public_key);
		lines[i] = zmqnet_dial(&a, endpoint);
	}
	lines[ARRAY_LEN(lines) - 1] = zmqnet_dial(&a, b.link->endpoint);
	link_zmq_look(a.link); /* too early */
	zmqnet_turn(20 * MS);
	known = true;
	link_zmq_look(a.link);
	assert_int_equal(looked_up, 1);
	a.link->ops->hangup(lines[2]);
	for (unsigned int turns = 0; a.lines_up == 0; turns++) {
		assert_true(turns < 20000);
		before = looked_up;
		loop_turn(zmqnet_loop, MS);
		most = looked_up - before > most ? looked_up - before : most;
	}
	assert_int_equal(most, 1);
	assert_int_equal(looked_up, ARRAY_LEN(lines) - 1);
	link_zmq_look(a.link); /* none is left */
	assert_int_equal(looked_up, ARRAY_LEN(lines) - 1);
	for (unsigned int i = 0; i < ARRAY_LEN(lines); i++)
		if (i != 2)
			a.link->ops->hangup(lines[i]);
}

int main(void)
{
#define TEST(name) cmocka_unit_test_setup_teardown(name, keydir_setup, keydir_teardown)
	const struct CMUnitTest tests[] = {
		TEST(pair_is_made_once_and_kept),
		TEST(key_pairs_created_at_once_are_one_each),
		TEST(key_directory_unusable_is_reported),
		TEST(key_published_is_found_while_its_daemon_runs),
		TEST(address_of_an_ended_daemon_is_its_successors),
		TEST(address_of_nobody_is_searched_again_after_a_change),
		TEST(search_that_could_not_read_is_not_remembered),
		TEST(key_of_a_killed_daemon_is_not_found),
		TEST(links_of_one_user_find_each_other),
		TEST(link_of_other_directory_is_not_same_user),
		TEST(lines_whose_keys_arrive_connect_one_a_turn),
	};
#undef TEST
	return cmocka_run_group_tests(tests, zmqnet_group_setup, zmqnet_group_teardown);
}
