/* SPDX-License-Identifier: Apache-2.0 */
/* The option table, the file parser and the checks over the whole struct. */
#include "daemon/config/config.h"

#include <errno.h>
#include <grp.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/endpoint.h"
#include "daemon/base/err.h"
#include "daemon/base/mem.h"
#include "tests/lib/tmp.h"

#define MS UINT64_C(1000000)
#define S UINT64_C(1000000000)

static const char *const built[] = {"shm", "ucx", NULL};
static char dir[48];

static const char *write_file(const char *text, size_t len)
{
	static char path[64];
	FILE *file;

	snprintf(path, sizeof(path), "%s/c.conf", dir);
	file = fopen(path, "w");
	assert_non_null(file);
	assert_int_equal(fwrite(text, 1, len, file), len);
	assert_int_equal(fclose(file), 0);
	return path;
}

static int load(const char *text, struct config *config)
{
	const struct config_source source = {.path = write_file(text, strlen(text)),
					     .transports = built};

	return config_load(config, &source);
}

static void must_load(const char *text, struct config *config)
{
	if (load(text, config) < 0)
		fail_msg("%s", err_last()->text);
}

/* The file is refused, and the error names line `line` and contains `words`. */
static void must_fail(const char *text, unsigned int line, const char *words)
{
	struct config config = {.rooms_max = 12345};
	char where[96];

	if (load(text, &config) != -EDOM)
		fail_msg("accepted: %s", text);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	snprintf(where, sizeof(where), "%s/c.conf:%u: ", dir, line);
	if (!strstr(err_last()->text, where) || !strstr(err_last()->text, words))
		fail_msg("for: %s\ngot: %s", text, err_last()->text);
	assert_int_equal(config.rooms_max, 12345); /* untouched */
}

static void config_empty_file_gives_the_documented_defaults(void **state)
{
	struct config c;

	(void)state;
	must_load("", &c);
	assert_string_equal(c.name, "kvd");
	assert_string_equal(c.socket_path, "/run/kvd/kvd.sock");
	assert_string_equal(c.listen, "tcp://127.0.0.1:0");
	assert_int_equal(c.socket_mode, 0660);
	assert_int_equal(c.rooms_max, 65536);
	assert_int_equal(c.tombstones_max, 65536);
	assert_int_equal(c.session_regions_max, 1024);
	assert_int_equal(c.session_pools_max, 64);
	assert_int_equal(c.sessions_max, 256);
	assert_int_equal(c.peers_max, 1024);
	assert_int_equal(c.early_requests_max, 4096);
	assert_int_equal(c.early_request_ttl_ns, 60 * S);
	assert_int_equal(c.client_queue_bytes, 8 << 20);
	assert_int_equal(c.peer_message_bytes, 1 << 20);
	assert_int_equal(c.ping_interval_ns, 200 * MS);
	assert_int_equal(c.dead_after_ns, 800 * MS);
	assert_int_equal(c.bootstrap_timeout_ns, 300 * S);
	assert_int_equal(c.waiting_timeout_ns, 300 * S);
	assert_int_equal(c.transfer_stall_timeout_ns, 10 * S);
	assert_int_equal(c.lease_ns, 30 * S);
	assert_int_equal(c.drain_timeout_ns, 30 * S);
	assert_int_equal(c.log_level, LOG_LEVEL_INFO);
	assert_true(c.copy_threads >= 1 && c.offload_threads >= 2);
	assert_int_equal(c.transports.count, 2);
	assert_string_equal(c.transports.word[0], "shm");
	assert_string_equal(c.transports.word[1], "ucx");
	assert_false(c.insecure);
}

static void config_file_values_are_taken(void **state)
{
	struct config c;

	(void)state;
	must_load("; a comment\n"
		  "[daemon]\n"
		  "  name = gpu-3   # why not\n"
		  "run_dir=/tmp/run ; and this\n"
		  "log_level: trace\n"
		  "[rooms]\r\n"
		  "offer_lease = 1500 ms\r\n"
		  "rooms = 10\n"
		  "[peer]\n"
		  "ping=5ms\n"
		  "[transport]\n"
		  "copy_slice = 1 MiB\n"
		  "transports = ucx, shm\n"
		  "[control]\n"
		  "socket_mode = 0600\n"
		  "allow_uids = 0, 1000 65534\n"
		  "[chunks]\n"
		  "chunk_memory = off\n"
		  "attention_threads = off\n"
		  "attention_busy_poll = off",
		  &c);
	assert_int_equal(c.chunk_memory_bytes, 0);
	assert_int_equal(c.attention_threads, 0);
	assert_int_equal(c.attention_busy_poll_us, 1);
	assert_string_equal(c.name, "gpu-3");
	assert_string_equal(c.socket_path, "/tmp/run/gpu-3.sock");
	assert_int_equal(c.log_level, LOG_LEVEL_TRACE);
	assert_int_equal(c.lease_ns, 1500 * MS);
	assert_int_equal(c.rooms_max, 10);
	assert_int_equal(c.ping_interval_ns, 5 * MS);
	assert_int_equal(c.slice_bytes, 1 << 20);
	assert_string_equal(c.transports.word[0], "ucx");
	assert_int_equal(c.socket_mode, 0600);
	assert_int_equal(c.allow_uids.count, 3);
	assert_int_equal(c.allow_uids.id[1], 1000);
}

static void config_wrong_values_name_line_and_range(void **state)
{
	(void)state;
	must_fail("[rooms]\noffer_lease = 5\n", 2, "unit is missing; allowed: 100 ms to");
	must_fail("[rooms]\noffer_lease = 5 KiB\n", 2, "not a unit");
	must_fail("[rooms]\noffer_lease = 1 ms\n", 2,
		  "outside the range; allowed: 100 ms to");
	must_fail("[rooms]\noffer_lease = -1 s\n", 2, "not a whole number");
	must_fail("[rooms]\noffer_lease = 1.5 s\n", 2, "not a unit");
	must_fail("[rooms]\noffer_lease =\n", 2, "not a whole number");
	must_fail("[rooms]\noffer_lease = 99999999999999999999 s\n", 2, "whole number");
	must_fail("[rooms]\noffer_lease = 9999999999999999999 min\n", 2, "outside");
	must_fail("\n\n[control]\nclient_queue = 1 ms\n", 4, "not a unit");
	must_fail("[control]\nclient_queue = 1 kB\n", 2, "not a unit");
	must_fail("[rooms]\nrooms = 0\n", 2, "outside the range; allowed: 1 to");
	must_fail("[rooms]\nrooms = 7 s\n", 2, "without a unit");
	must_fail("[rooms]\nrooms = 0x10\n", 2, "without a unit");
	must_fail("[control]\nsocket_mode = 0888\n", 2, "not an octal mode");
	must_fail("[control]\nsocket_mode = 7777\n", 2, "0600 to 0777");
	must_fail("[control]\nallow_uids = no-such-user-here\n", 2, "no such user");
	must_fail("[control]\nallow_gids = 4294967295\n", 2, "number");
	must_fail("[daemon]\nsandbox = maybe\n", 2, "allowed: yes or no");
	must_fail("[daemon]\nlog_level = loud\n", 2,
		  "allowed: one of error warn info debug trace");
	must_fail("[daemon]\nrun_dir = run\n", 2, "not an absolute path");
	must_fail("[transport]\ncopy_threads = 0\n", 2, "auto, or 1 to");
	must_fail("[chunks]\nattention_busy_poll = 1\n", 2, "auto, off, or 2 to");
	must_fail("[chunks]\nchunk_memory = 0 B\n", 2, "off, or 1 MiB to");
	must_fail("[chunks]\nchunk_memory = auto\n", 2, "off, or 1 MiB to");
}

static void config_unknown_or_misplaced_names_are_refused(void **state)
{
	(void)state;
	must_fail("[rooms]\n\nleaze = 5 s\n", 3, "no such option");
	must_fail("offer_lease = 5 s\n", 1, "belongs in [rooms]");
	must_fail("[peer]\noffer_lease = 5 s\n", 2, "belongs in [rooms], not [peer]");
	must_fail("[rooms]\noffer_lease = 5 s\noffer_lease = 5 s\n", 3,
		  "already set in line 2");
	must_fail("[rooms]\noffer_lease\n", 2, "neither");
	must_fail("[rooms\noffer_lease = 5 s\n", 1, "neither");
}

static void config_hostile_bytes_are_refused(void **state)
{
	static char text[2 << 20];
	struct config c;
	struct config_source source = {.transports = built};

	(void)state;
	memset(text, 'x', sizeof(text));
	memcpy(text, "[daemon]\nname = ", 16);
	text[5000] = '\n';
	text[5001] = '\0';
	must_fail(text, 2, "over 4093 bytes");
	source.path = write_file("[daemon]\nname = a\0b\n", 20);
	assert_int_equal(config_load(&c, &source), -EDOM);
	source.path = write_file(text, sizeof(text));
	assert_int_equal(config_load(&c, &source), -EDOM);
	assert_non_null(strstr(err_last()->text, "over 1048576 bytes"));
	source.path = "/nonexistent/kvd.conf";
	assert_int_equal(config_load(&c, &source), -EDOM);
	assert_non_null(strstr(err_last()->text, "No such file"));
	source.path = dir;
	assert_int_equal(config_load(&c, &source), -EDOM);
}

static void config_impossible_combinations_are_refused(void **state)
{
	(void)state;
	must_fail("[peer]\nping = 500 ms\n", 2, "twice ping");
	must_fail("[peer]\ninsecure = yes\nlisten = tcp://*:7000\n", 3, "set advertise");
	must_fail("[peer]\nlisten = tcp://localhost:1\n", 2, "tcp://ADDRESS:PORT");
	must_fail("[peer]\nlisten = tcp://127.0.0.1:65536\n", 2, "0 to 65535");
	must_fail("[peer]\nlisten = tcp://127.0.0.1:\n", 2, "0 to 65535");
	must_fail("[peer]\nlisten = ipc:///tmp/x\n", 2, "tcp://ADDRESS:PORT");
	must_fail("[peer]\nlisten = tcp://::1:7000\n", 2, "tcp://ADDRESS:PORT");
	must_fail("[peer]\nadvertise = tcp://*:1\n", 2, "others can reach");
	must_fail("[chunks]\nchunk_peers = tcp://a:1 b:2\n", 2, "chunk_peers: 'b:2'");
	must_fail("[chunks]\nchunk_index = clusters\n", 2, "chunk_index: 'clusters'");
	must_fail("[chunks]\nchunk_index = tcp://a:1,tcp://b:65536\n", 2, "65536");
	must_fail("[peer]\ncurve_secret_file = /etc/kvd/key\n", 2, "curve_allow_file");
	must_fail(
		"[peer]\ncurve_secret_file = /k\ncurve_allow_file = /a\nkeys_dir = /d\n",
		4, "one of them");
	must_fail("[peer]\ninsecure = yes\ncurve_allow_file = /a\n", 3, "no keys");
	must_fail("[peer]\nkeys_dir = /d\ninsecure = yes\n", 3, "no keys");
	must_fail("[daemon]\nname = ../evil\n", 2, "letters, digits");
	must_fail("[daemon]\nname =\n", 2, "letters, digits");
	must_fail("[control]\nsocket_mode = 0666\n", 2, "open to all users");
	must_fail("[control]\nsocket_group = no-such-group-here\n", 2, "no such group");
	must_fail("[transport]\ncopy_slice = 1 MiB\nmax_inflight = 64 KiB\n", 3,
		  "larger");
	must_fail("[transport]\ntransports = shm, verbs\n", 2,
		  "verbs is not built in (make MODULES=); use shm, ucx");
	must_fail("[transport]\ntransports = shm, carrier\n", 2, "carrier is unknown");
	must_fail("[transport]\ntransports = shm shm\n", 2, "repeated");
	must_fail("[chunks]\nchunk_memory = 1 MiB\n[transport]\ntransports = ucx\n", 4,
		  "shm is missing");
	must_fail("[transport]\ntransports =\n", 2, "the list is empty");
	must_fail("[transport]\nrequire = rdma\ntransports = shm\n", 3, "no such");
	must_fail("[peer]\nlisten = tcp://10.0.0.1:1\ncurve_secret_file = /k\n"
		  "curve_allow_file = /a\n[transport]\ntransports = ucx\n",
		  6, "insecure = yes");
	must_fail("[control]\nsocket_path = /"
		  "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx"
		  "xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\n",
		  2, "at most 107");
}

static void config_possible_combinations_are_taken(void **state)
{
	struct config c;

	(void)state;
	must_load("[peer]\nlisten = tcp://10.0.0.1:0\ncurve_allow_file = /a\n", &c);
	must_load("[peer]\nlisten = tcp://10.0.0.1:0\nkeys_dir = /d\n", &c);
	must_load("[peer]\nlisten = tcp://10.0.0.1:0\ncurve_secret_file = /k\n"
		  "curve_allow_file = /a\n",
		  &c);
	/* auto omits transports that listen does not allow */
	assert_int_equal(c.transports.count, 1);
	assert_string_equal(c.transports.word[0], "shm");
	must_load("[peer]\nlisten = tcp://10.0.0.1:0\ninsecure = yes\n", &c);
	assert_int_equal(c.transports.count, 2);
	must_load("[peer]\nlisten = tcp://10.0.0.1:0\ncurve_secret_file = /k\n"
		  "curve_allow_file = /a\ninsecure = yes\n",
		  &c);
	assert_int_equal(c.transports.count, 2);
	must_load("[peer]\nlisten = tcp://*:7\ninsecure = yes\n"
		  "advertise = tcp://node-a:0\n",
		  &c);
	must_load("[peer]\nlisten = tcp://[::1]:7\n", &c);
	must_load("[transport]\nrequire = rdma\n", &c);
	must_load("[chunks]\nchunk_index = cluster\n", &c);
	must_load("[chunks]\nchunk_peers = tcp://[::1]:7#key, tcp://b:1\n", &c);
	must_load("[control]\nsocket_mode = 0666\nallow_uids = root\n", &c);
}

static void collect(void *arg, const char *text)
{
	strcat(arg, text);
	strcat(arg, "\n");
}

static void config_all_problems_are_reported(void **state)
{
	char problems[4096] = "";
	struct config c;
	const char *text = "[rooms]\noffer_lease = 5\n[peer]\nping = 1 min\n";
	const struct config_source source = {.path = write_file(text, strlen(text)),
					     .transports = built,
					     .on_problem = collect,
					     .arg = problems};

	(void)state;
	assert_int_equal(config_load(&c, &source), -EDOM);
	assert_non_null(strstr(problems, "c.conf:2: offer_lease = 5"));
	assert_non_null(strstr(problems, "c.conf:4: dead_after"));
}

static void config_name_precedence_is_argument_environment_file(void **state)
{
	const char *text = "[daemon]\nname = filed\n";
	struct config_source source = {.transports = built};
	struct config c;

	(void)state;
	setenv("KVD_CONFIG", write_file(text, strlen(text)), 1);
	assert_int_equal(config_load(&c, &source), 0);
	assert_string_equal(c.name, "filed");
	setenv("KVD_NAME", "environ", 1);
	assert_int_equal(config_load(&c, &source), 0);
	assert_string_equal(c.name, "environ");
	source.name = "given";
	assert_int_equal(config_load(&c, &source), 0);
	assert_string_equal(c.name, "given");
	assert_string_equal(c.socket_path, "/run/kvd/given.sock");
	source.name = "a/b";
	assert_int_equal(config_load(&c, &source), -EDOM);
	unsetenv("KVD_CONFIG");
	unsetenv("KVD_NAME");
}

/* The sample with every '#option' made live is a valid file of defaults. */
static void sample_uncommented_loads_as_the_defaults(void **state)
{
	struct config defaults, loaded;
	const struct setting *row;
	char *text = NULL, *live, *out;
	size_t len, count;
	FILE *file = open_memstream(&text, &len);

	(void)state;
	config_print_sample(file);
	fclose(file);
	live = out = mem_zalloc(len + 1);
	for (char *line = text; *line;) {
		char *eol = strchr(line, '\n');

		if (line[0] == '#' && line[1] >= 'a' && line[1] <= 'z')
			line++;
		memcpy(out, line, (size_t)(eol + 1 - line));
		out += eol + 1 - line;
		line = eol + 1;
	}
	must_load(text, &defaults);
	must_load(live, &loaded);
	for (row = config_settings(&count); count; count--, row++)
		assert_true(setting_equal(row, &defaults, &loaded));
	free(text);
	mem_free(live);
}

/* Every row: unique name, valid preset, format parses back to itself. */
static void table_rows_are_sound(void **state)
{
	char text[SETTING_TEXT_MAX], again[SETTING_TEXT_MAX];
	const struct setting *rows;
	struct config a = {0}, b = {0};
	size_t count;

	(void)state;
	rows = config_settings(&count);
	for (size_t i = 0; i < count; i++) {
		for (size_t k = 0; k < i; k++)
			assert_string_not_equal(rows[i].name, rows[k].name);
		assert_true(strlen(rows[i].help) > 10);
		assert_int_equal(setting_parse(&rows[i], rows[i].preset, &a), 0);
		setting_format(&rows[i], &a, text);
		assert_int_equal(setting_parse(&rows[i], text, &b), 0);
		setting_format(&rows[i], &b, again);
		assert_string_equal(text, again);
		assert_true(setting_equal(&rows[i], &a, &b));
		setting_range(&rows[i], text);
		assert_true(*text);
	}
}

static void note_kept(void *arg, const char *name)
{
	strcat(arg, name);
	strcat(arg, " ");
}

static void reload_applies_allowed_options_and_names_others(void **state)
{
	struct config c, fresh;
	char kept[256] = "";

	(void)state;
	must_load("", &c);
	must_load("[rooms]\noffer_lease = 7 s\nrooms = 12\n[daemon]\nlog_level = debug\n",
		  &fresh);
	assert_int_equal(config_reload(&c, &fresh, note_kept, kept), 2);
	assert_string_equal(kept, "rooms.rooms ");
	assert_int_equal(c.lease_ns, 7 * S);
	assert_int_equal(c.log_level, LOG_LEVEL_DEBUG);
	assert_int_equal(c.rooms_max, 65536);
	kept[0] = '\0';
	assert_int_equal(config_reload(&c, &c, note_kept, kept), 0);
	assert_string_equal(kept, "");
}

static void admission_follows_uids_and_gids(void **state)
{
	const gid_t gids[] = {50, 60};
	const uid_t other = geteuid() == 12345 ? 12346 : 12345;
	struct config c;

	(void)state;
	must_load("", &c);
	assert_true(config_admits(&c, other, NULL, 0));
	assert_false(config_is_admin(&c, other));
	assert_true(config_is_admin(&c, 0));
	assert_true(config_is_admin(&c, geteuid()));
	must_load("[control]\nallow_uids = 1000\nallow_gids = 60\nadmin_uids = 77\n", &c);
	assert_false(config_admits(&c, other, gids, 1));
	assert_true(config_admits(&c, other, gids, 2));
	assert_true(config_admits(&c, 1000, NULL, 0));
	assert_true(config_admits(&c, 77, NULL, 0));
	assert_true(config_is_admin(&c, 77));
	assert_true(config_admits(&c, 0, NULL, 0));
}

static void loopback_is_distinguished(void **state)
{
	(void)state;
	assert_true(endpoint_is_loopback("tcp://127.0.0.1:0"));
	assert_true(endpoint_is_loopback("tcp://127.9.9.9:1"));
	assert_true(endpoint_is_loopback("tcp://[::1]:1"));
	assert_false(endpoint_is_loopback("tcp://128.0.0.1:1"));
	assert_false(endpoint_is_loopback("tcp://0.0.0.0:1"));
	assert_false(endpoint_is_loopback("tcp://[::]:1"));
	assert_false(endpoint_is_loopback("tcp://localhost:1"));
	assert_false(endpoint_is_loopback("tcp://[]:1"));
	assert_false(endpoint_is_loopback("tcp://:1"));
	assert_false(endpoint_is_loopback(""));
}

static void config_without_memory_answers(void **state)
{
	struct config c;

	(void)state;
	for (uint64_t n = 1; n <= 2; n++) {
		const struct config_source source = {.path = write_file("", 0),
						     .transports = built};

		mem_fail_at(n);
		assert_int_equal(config_load(&c, &source), -ENOMEM);
	}
	mem_fail_at(0);
}

static int make_dir(void **state)
{
	(void)state;
	return mkdtemp(tmp_path(dir, sizeof(dir), "kvd-config-XXXXXX")) ? 0 : -1;
}

static int remove_dir(void **state)
{
	char path[64];

	(void)state;
	snprintf(path, sizeof(path), "%s/c.conf", dir);
	unlink(path);
	return rmdir(dir);
}

static void memory_above_the_limit_is_refused_by_name(void **state)
{
	struct config c;

	(void)state;
	must_load("[chunks]\nchunk_memory = 300 MiB\nchunk_index_memory = off\n", &c);
	assert_int_equal(config_memory_check(&c, UINT64_C(301) << 20), 0);
	assert_true(config_memory_check(&c, UINT64_C(100) << 20) < 0);
	assert_int_equal(err_last()->code, ERR_CONFIG);
	assert_non_null(strstr(err_last()->text, "chunk_memory: 300 MiB"));
	assert_non_null(strstr(err_last()->text, "100 MiB"));
	must_load("[chunks]\nchunk_memory = 300 MiB\nchunk_index_memory = 1 GiB\n", &c);
	assert_int_equal(config_memory_check(&c, UINT64_C(1) << 30), 1);
	assert_non_null(strstr(err_last()->text, "together 1324 MiB"));
	must_load("[daemon]\nmemory_limit = 2 GiB\n", &c);
	assert_int_equal(config_memory_check(&c, UINT64_C(1) << 30), 1);
	must_load("", &c); /* its presets fit everywhere */
	assert_int_equal(config_memory_check(&c, UINT64_C(64) << 20), 0);
	err_clear();
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(config_empty_file_gives_the_documented_defaults),
		cmocka_unit_test(config_file_values_are_taken),
		cmocka_unit_test(config_wrong_values_name_line_and_range),
		cmocka_unit_test(config_unknown_or_misplaced_names_are_refused),
		cmocka_unit_test(config_hostile_bytes_are_refused),
		cmocka_unit_test(config_impossible_combinations_are_refused),
		cmocka_unit_test(config_possible_combinations_are_taken),
		cmocka_unit_test(config_all_problems_are_reported),
		cmocka_unit_test(config_name_precedence_is_argument_environment_file),
		cmocka_unit_test(sample_uncommented_loads_as_the_defaults),
		cmocka_unit_test(table_rows_are_sound),
		cmocka_unit_test(reload_applies_allowed_options_and_names_others),
		cmocka_unit_test(admission_follows_uids_and_gids),
		cmocka_unit_test(loopback_is_distinguished),
		cmocka_unit_test(config_without_memory_answers),
		cmocka_unit_test(memory_above_the_limit_is_refused_by_name),
	};

	return cmocka_run_group_tests(tests, make_dir, remove_dir);
}
