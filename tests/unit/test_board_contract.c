/* SPDX-License-Identifier: Apache-2.0 */
/* The contract of directories, on a board; test_board has what boards do besides. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdlib.h>

#include <cmocka.h>

#include "daemon/base/log.h"
#include "daemon/cluster/board_directory_impl.h"
#include "tests/lib/board_net.h"
#include "tests/lib/directory_tests.h"

/* Member i is node i + 1. */
static struct directory *rig_member(struct directory_rig *rig, unsigned int i)
{
	(void)rig;
	if (!f.n[i + 1].link)
		node_start(i + 1);
	if (!f.n[i + 1].directory)
		assert_int_equal(directory_open(i + 1, endpoint(0), NULL), 0);
	return f.n[i + 1].directory;
}

static void rig_crash(struct directory_rig *rig, unsigned int i)
{
	(void)rig;
	link_mem_crash(f.n[i + 1].link, MEM_CRASH_POWER);
	node_stop(i + 1);
}

static void rig_leave(struct directory_rig *rig, unsigned int i)
{
	(void)rig;
	directory_close(i + 1);
}

static void rig_turn(struct directory_rig *rig)
{
	(void)rig;
	loop_turn(f.loop, 5 * MS);
}

static uint64_t rig_now_ns(const struct directory_rig *rig)
{
	(void)rig;
	return loop_now_ns(f.loop);
}

static int rig_new(void **state)
{
	static struct directory_rig rig = {.lease_ns = LEASE_NS,
					   .member = rig_member,
					   .crash = rig_crash,
					   .leave = rig_leave,
					   .turn = rig_turn,
					   .now_ns = rig_now_ns};

	board_net_setup_bare(NULL);
	run_for(2 * LEASE_NS); /* the board is not young any more */
	*state = &rig;
	return 0;
}

/* What a test published lay on its stack. */
static void forget_publications(struct directory *directory)
{
	struct board_said *said;

	list_foreach(said, &board_directory_of(directory)->said, link)
		said->publication = NULL;
}

static int rig_free(void **state)
{
	for (unsigned int i = 0; i < NODES; i++) {
		if (f.n[i].directory)
			forget_publications(f.n[i].directory);
	}
	return board_net_teardown(state);
}

int main(void)
{
	const struct CMUnitTest tests[] = {DIRECTORY_TESTS(rig_new, rig_free)};

	log_set_level(LOG_LEVEL_ERROR);
	return cmocka_run_group_tests_name("board_contract", tests, NULL, NULL);
}
