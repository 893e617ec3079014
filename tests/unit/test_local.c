/* SPDX-License-Identifier: Apache-2.0 */
/* The directory of one daemon: the contract of directories, and the lines of its file.
 * The directory that daemons of other tests share is held to the contract, too. */
#include "daemon/cluster/local.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/cluster/cluster_file.h"
#include "daemon/loop/loop.h"
#include "tests/lib/directory_hub.h"
#include "tests/lib/directory_tests.h"
#include "tests/lib/tmp.h"

#define KEY "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
#define OTHER "Yne@$w-vo<fVvi]a<NY6T1ed:M$fCG*[IaLV{hID"
#define OWN "tcp://10.0.0.1:7400#" KEY

static struct test {
	struct directory_rig rig;
	struct loop *loop;
	struct directory_hub *hub; /* NULL: all members are one */
	struct directory *members[DIRECTORY_MEMBERS];
} t;

static struct directory *rig_member(struct directory_rig *rig, unsigned int i)
{
	(void)rig;
	if (!t.hub)
		i = 0;
	if (!t.members[i] && t.hub)
		t.members[i] = directory_hub_member(t.hub);
	if (!t.members[i])
		assert_int_equal(local_new(t.loop, NULL, OWN, &t.members[i]), 0);
	return t.members[i];
}

static void rig_leave(struct directory_rig *rig, unsigned int i)
{
	(void)rig;
	if (!t.hub)
		i = 0;
	if (t.members[i])
		t.members[i]->ops->free(t.members[i]);
	t.members[i] = NULL;
}

static void rig_crash(struct directory_rig *rig, unsigned int i)
{
	directory_hub_crash(t.members[i]);
	rig_leave(rig, i);
}

static void rig_turn(struct directory_rig *rig)
{
	(void)rig;
	loop_turn(t.loop, 5 * LOOP_NS_PER_MS);
}

static uint64_t rig_now_ns(const struct directory_rig *rig)
{
	(void)rig;
	return loop_now_ns(t.loop);
}

static int alone_new(void **state)
{
	t = (struct test){.rig = {.lease_ns = 3 * LOOP_NS_PER_S,
				  .member = rig_member,
				  .crash = rig_crash,
				  .leave = rig_leave,
				  .turn = rig_turn,
				  .now_ns = rig_now_ns}};
	assert_int_equal(loop_new_virtual(1, &t.loop), 0);
	*state = &t.rig;
	return 0;
}

/* Each entry in a turn of its own. */
static int slow_new(void **state)
{
	alone_new(state);
	loop_virtual_parts(t.loop, 1);
	return 0;
}

static int shared_new(void **state)
{
	alone_new(state);
	t.hub = directory_hub_new(t.loop, t.rig.lease_ns);
	return 0;
}

static int rig_free(void **state)
{
	(void)state;
	for (unsigned int i = 0; i < DIRECTORY_MEMBERS; i++)
		rig_leave(&t.rig, i);
	if (t.hub)
		directory_hub_free(t.hub);
	loop_free(t.loop);
	return 0;
}

/* ---- lines ---- */

static char path[64];

static void file_write(const char *text)
{
	FILE *out = fopen(path, "w");

	assert_non_null(out);
	assert_true(fputs(text, out) >= 0);
	assert_int_equal(fclose(out), 0);
}

static struct cluster_file *file_load(const char *text)
{
	struct cluster_file *file;
	char option[sizeof(path) + 8];

	file_write(text);
	snprintf(option, sizeof(option), "file:%s", path);
	if (cluster_file_load(option, &file) < 0)
		fail_msg("%s", err_last()->text);
	return file;
}

static void lines(const char *text)
{
	struct cluster_file *file = file_load(text);

	assert_int_equal(local_lines(rig_member(&t.rig, 0), file), 0);
	cluster_file_free(file);
}

static const char *record_at(struct seen *seen, const struct place *place)
{
	const struct seen_entry *entry = seen_find(seen, place);

	return entry && entry->there ? entry->record : NULL;
}

static void turns(void)
{
	for (unsigned int i = 0; i < 1000; i++)
		rig_turn(&t.rig);
}

static void seen_done(struct seen *seen)
{
	t.members[0]->ops->unwatch(&seen->watch);
	seen_free(seen);
}

static void lines_published_are_read(void **state)
{
	struct place a = directory_place("g", "a", 0), b = directory_place("g", "b", 0),
		     only = directory_place("h", "", 0);
	struct seen *seen, *other;

	(void)state;
	lines("# members\n\n"
	      "g a 0.0.0.0 " OWN " pool=kv url=http://10.0.0.1:8000 engine=vllm\n"
	      "g b 0.0.0.0 tcp://10.0.0.2:7400#" OTHER "\n"
	      "h - 0.0.0.0 tcp://10.0.0.3:7400 bootstrap=10.0.0.3:8998 model=m\n");
	seen = seen_new(rig_member(&t.rig, 0), "g", true);
	other = seen_new(rig_member(&t.rig, 0), "h", true);
	turns();
	assert_int_equal(seen->synced, 1);
	assert_int_equal(seen->there, 2);
	assert_non_null(strstr(record_at(seen, &a), "\"url\":\"http://10.0.0.1:8000\""));
	assert_non_null(strstr(record_at(seen, &a), "\"pools\":[{\"name\":\"kv\""));
	assert_non_null(strstr(record_at(seen, &b), "\"key\":\"" OTHER "\""));
	assert_null(strstr(record_at(seen, &b), "pools"));
	assert_non_null(
		strstr(record_at(other, &only), "\"bootstrap\":\"10.0.0.3:8998\""));
	/* one goes, one changes, one comes, and a whole group goes */
	lines("g b 0.0.0.0 tcp://10.0.0.2:7401#" OTHER "\n"
	      "g b 1.0.0.0 tcp://10.0.0.2:7400#" OTHER "\n");
	turns();
	assert_int_equal(seen->there, 2);
	assert_null(record_at(seen, &a));
	assert_non_null(strstr(record_at(seen, &b), "10.0.0.2:7401"));
	assert_non_null(strstr(record_at(seen, &b), "\"size\":{\"tp\":2,"));
	assert_int_equal(other->there, 0);
	lines("");
	turns();
	assert_int_equal(seen->there, 0);
	seen_done(seen);
	seen_done(other);
}

static void session_takes_the_place_of_its_daemons_line(void **state)
{
	struct place a = directory_place("g", "a", 0), b = directory_place("g", "b", 0),
		     c = directory_place("g", "c", 0);
	static const char file[] = "g a 0.0.0.0 tcp://box:7400#" KEY "\n"
				   "g b 0.0.0.0 " OWN "\n"
				   "g c 0.0.0.0 tcp://10.0.0.1:7400#" OTHER "\n";
	struct directory *directory = rig_member(&t.rig, 0);
	static struct said said, rival;
	struct seen *seen;

	(void)state;
	lines(file);
	seen = seen_new(directory, "g", true);
	said_init(&said);
	said_init(&rival);
	assert_int_equal(
		directory->ops->publish(directory, &said.publication, &a, "own", "l"), 0);
	assert_true(directory->ops->publish(directory, &rival.publication, &c, "own",
					    NULL) < 0);
	assert_int_equal(err_last()->code, ERR_EXIST);
	assert_non_null(strstr(err_last()->text, "correct the line"));
	err_clear();
	turns();
	assert_int_equal(said.done, 1);
	assert_true(seen_has(seen, &a, "own", "l"));
	/* the file's are back with the session's end, and a reload leaves the session's
	 */
	lines(file);
	turns();
	assert_true(seen_has(seen, &a, "own", "l"));
	directory->ops->withdraw(&said.publication);
	turns();
	assert_non_null(strstr(record_at(seen, &a), "tcp://box:7400"));
	assert_false(seen_find(seen, &a)->has_load);
	assert_int_equal(seen_find(seen, &a)->gone, 0);
	/* its line goes meanwhile */
	assert_int_equal(
		directory->ops->publish(directory, &said.publication, &b, "own", NULL),
		0);
	lines("");
	turns();
	assert_int_equal(seen->there, 1);
	directory->ops->withdraw(&said.publication);
	turns();
	assert_int_equal(seen->there, 0);
	seen_done(seen);
}

static void reader_behind_gets_removed_entries(void **state)
{
	enum { MANY = 1000 };
	struct directory *directory = rig_member(&t.rig, 0);
	static struct said said[MANY];
	struct seen *seen = seen_new(directory, "g", true);

	(void)state;
	for (unsigned int i = 0; i < MANY; i++) {
		struct place place = directory_place("g", "w", i);

		said_init(&said[i]);
		assert_int_equal(directory->ops->publish(directory, &said[i].publication,
							 &place, "r", "l"),
				 0);
	}
	turns();
	turns();
	assert_int_equal(seen->there, MANY);
	for (unsigned int i = 1; i < MANY; i++)
		directory->ops->withdraw(&said[i].publication);
	turns();
	assert_int_equal(seen->there, 1);
	assert_int_equal(seen->told, 2 * MANY - 1);
	seen_done(seen);
}

static void want_of_memory_is_made_up_for(void **state)
{
	struct directory *directory = rig_member(&t.rig, 0);
	struct cluster_file *file = file_load("g a 0.0.0.0 " OWN "\nh a 0.0.0.0 " OWN
					      "\nh b 0.0.0.0 tcp://10.0.0.9:1\n");
	bool failed = true;

	(void)state;
	for (uint64_t i = 1; failed; i++) {
		struct seen *seen = seen_new(directory, "h", false);

		mem_fail_at(i);
		failed = local_lines(directory, file) < 0;
		turns();
		mem_fail_at(0);
		err_clear();
		assert_int_equal(local_lines(directory, file), 0);
		turns();
		assert_int_equal(seen->there, 2);
		lines("");
		turns();
		assert_int_equal(seen->there, 0);
		seen_done(seen);
	}
	cluster_file_free(file);
}

int main(void)
{
	const struct CMUnitTest tests[] = {
		DIRECTORY_TESTS_ALONE(alone_new, rig_free),
		DIRECTORY_TESTS_ALONE(slow_new, rig_free),
		DIRECTORY_TESTS(shared_new, rig_free),
		DIRECTORY_TEST(lines_published_are_read, slow_new, rig_free),
		DIRECTORY_TEST(session_takes_the_place_of_its_daemons_line, alone_new,
			       rig_free),
		DIRECTORY_TEST(reader_behind_gets_removed_entries, slow_new, rig_free),
		DIRECTORY_TEST(want_of_memory_is_made_up_for, alone_new, rig_free),
	};
	int fd = mkstemp(tmp_path(path, sizeof(path), "kvd-test-members-XXXXXX")), failed;

	if (fd < 0)
		return 1;
	failed = cmocka_run_group_tests_name("local", tests, NULL, NULL);
	unlink(path);
	return failed;
}
