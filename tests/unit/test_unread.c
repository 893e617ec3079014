/* SPDX-License-Identifier: Apache-2.0 */
/*
 * What waits for somebody to read it, or is held in a session's name, is charged:
 * replies, notifications, attachments, secrets, touched parts of a status page.
 */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

#include "daemon/base/context.h"
#include "daemon/base/mem.h"
#include "daemon/control/outbox.h"
#include "daemon/handshake/handshake.h"
#include "daemon/session/session.h"
#include "daemon/session/status.h"
#include "tests/lib/accounts.h"
#include "tests/lib/xfer_pair.h"

#define LARGE (256u << 10)
#define MANY UINT64_C(100000000)
#define ATTACH "{'cmd':'peer.attach','endpoint':'%s','session':'%llu','secret':'%s'}"

/* ---- replies ---- */

static void send_text(struct outbox *outbox, char *bytes, size_t len)
{
	struct text text = text_on(bytes, len);

	text.len = len;
	assert_int_equal(outbox_send(outbox, &text, NULL, 0, MANY), 0);
}

static void replies_unread_are_charged(void **state)
{
	struct accounts accounts = {.limit = 8u << 20};
	struct account *account = account_get(&accounts, "uid", "7");
	struct outbox outbox;
	uint64_t waiting = 0;
	char *text = calloc(1, LARGE);
	int pair[2];

	(void)state;
	assert_int_equal(socketpair(AF_UNIX, SOCK_STREAM, 0, pair), 0);
	outbox_init(&outbox, pair[0]);
	outbox.account = account;
	send_text(&outbox, text, 10);
	assert_int_equal(accounts.total, 0); /* it goes with the turn's others */
	for (unsigned int i = 0; i < 8; i++)
		send_text(&outbox, text, LARGE);
	waiting = accounts.total;
	assert_true(waiting > 4 * LARGE);
	assert_int_equal(account->bytes[ACCOUNT_REPLIES], outbox.bytes);
	assert_true(read(pair[1], text, LARGE) > 0);
	assert_int_equal(outbox_flush(&outbox), 0);
	assert_true(accounts.total < waiting);
	assert_int_equal(account->bytes[ACCOUNT_REPLIES], outbox.bytes);
	while (!outbox_empty(&outbox)) {
		assert_true(read(pair[1], text, LARGE) > 0);
		assert_int_equal(outbox_flush(&outbox), 0);
	}
	assert_int_equal(accounts.total, 0);
	for (unsigned int i = 0; i < 8; i++) {
		struct text taken = {.data = mem_zalloc(LARGE), .len = LARGE};

		assert_int_equal(outbox_send(&outbox, &taken, NULL, 0, MANY), 0);
		assert_null(taken.data);
	}
	assert_true(accounts.total > 4 * LARGE);
	outbox_fini(&outbox);
	account_unref(account);
	assert_true(accounts_idle(&accounts));
	close(pair[0]);
	close(pair[1]);
	free(text);
}

/* ---- the status page ---- */

static void page_is_charged_as_it_is_touched(void **state)
{
	static const uint8_t instance[16] = "0123456789abcde";
	struct accounts accounts = {.limit = 64u << 10};
	struct account *account = account_get(&accounts, "uid", "7");
	struct charge charge = {0};
	struct status_page *page = NULL;
	uint32_t slot, gen, first = UINT32_MAX, taken = 0;

	(void)state;
	assert_int_equal(status_page_new(2 * 65536, instance, &page), 0);
	status_page_divide(page, 65536);
	charge_force(&charge, account, ACCOUNT_SESSIONS, 0);
	status_page_charge(page, &charge);
	while (status_slot_take(page, taken, &slot, &gen) == 0) {
		first = first == UINT32_MAX ? slot : first;
		taken++;
	}
	assert_int_equal(err_last()->code, ERR_LIMIT);
	assert_non_null(strstr(err_last()->text, "uid:7: sessions: "));
	err_clear();
	/* 56 KiB in parts of 4 KiB and what they take beside */
	assert_true(taken >= 10 * 64 && taken <= 14 * 64);
	assert_true(accounts.total <= accounts_share(&accounts));
	status_slot_release(page, first); /* it is used again: nothing is touched anew */
	assert_int_equal(status_slot_take(page, 1, &slot, &gen), 0);
	assert_int_equal(slot, first);
	/* an engine's own slots are counted, too, and never refused */
	accounts.limit = 1u << 20;
	for (uint32_t i = 0; i < 100; i++) {
		uint64_t before = accounts.total;

		slot = 65536 + 640 * i;
		assert_int_equal(
			status_slot_claim(page, slot, status_slot_gen(page, slot) + 1, 1),
			0);
		assert_true(accounts.total > before + 4095);
	}
	status_page_free(page);
	charge_drop(&charge);
	account_unref(account);
	assert_true(accounts_idle(&accounts));
}

/* ---- of the transfer layer ---- */

static struct remote *remote_of_me(struct pair *p)
{
	struct remote *remote;

	list_foreach(remote, handshake_remotes(p->you->kvd->handshake), link)
		return remote;
	fail_msg("node 1 knows nobody");
	return NULL;
}

static unsigned int drained(struct pair *p)
{
	cJSON *answer = cluster_call(&p->c, p->you, "{'cmd':'notif.drain'}");
	unsigned int count = (unsigned int)cJSON_GetArraySize(
		cJSON_GetObjectItemCaseSensitive(answer, "notifs"));

	cJSON_Delete(answer);
	return count;
}

static void tell(struct pair *p, unsigned int times)
{
	for (unsigned int i = 0; i < times; i++)
		pair_notify(p, "hello", 5);
	cluster_run(&p->c, LOOP_NS_PER_S);
}

static void notifications_are_charged_to_sender(void **state)
{
	struct pair *p = *state;
	struct account *account = remote_of_me(p)->account;
	struct charge filler = {0};
	uint64_t one;

	tell(p, 1);
	one = account->bytes[ACCOUNT_NOTIFS];
	assert_true(one > 5);
	assert_int_equal(p->you->account->bytes[ACCOUNT_NOTIFS], 0);
	tell(p, 2);
	assert_int_equal(account->bytes[ACCOUNT_NOTIFS], 3 * one);
	account_leave(account, one, &filler);
	tell(p, 1);
	assert_int_equal(account->objects[ACCOUNT_NOTIFS], 4);
	tell(p, 3); /* refused by name, nothing else ends */
	assert_int_equal(account->objects[ACCOUNT_NOTIFS], 4);
	assert_true(account->refused >= 1);
	assert_int_equal(drained(p), 4);
	assert_int_equal(account->bytes[ACCOUNT_NOTIFS], 0);
	charge_drop(&filler);
	tell(p, 1);
	assert_int_equal(drained(p), 1);
	tell(p, 1); /* and goes with its session: see accounts_idle() of the teardown */
}

static void attachments_and_secrets_are_charged_to_their_session(void **state)
{
	struct pair *p = *state;
	struct account *account = p->me->account;
	struct charge filler = {0};
	uint64_t held = account->bytes[ACCOUNT_ATTACHES], one = held;

	assert_true(held > 0);
	assert_int_equal(pair_attach(p, p->me, p->you, 1), p->attach);
	assert_int_equal(account->bytes[ACCOUNT_ATTACHES], one);
	(void)pair_attach(p, p->me, cluster_engine(&p->c, 1, "other"), 1);
	assert_int_equal(account->bytes[ACCOUNT_ATTACHES], 2 * one);
	account_leave(account, one - 1, &filler);
	cluster_refused(&p->c, p->me, "ELIMIT", ATTACH, p->c.nodes[1].endpoint,
			(unsigned long long)p->you->epoch,
			"00000000000000000000000000000000");
	charge_drop(&filler);
	assert_int_equal(account->bytes[ACCOUNT_ATTACHES], 2 * one);

	account = p->you->account;
	held = account->bytes[ACCOUNT_ATTACHES];
	cluster_ok(&p->c, p->you, "{'cmd':'secret.create','regions':[%llu]}",
		   (unsigned long long)p->yours.region);
	assert_true(account->bytes[ACCOUNT_ATTACHES] > held);
	held = account->bytes[ACCOUNT_ATTACHES];
	account_leave(account, 8, &filler);
	cluster_refused(&p->c, p->you, "ELIMIT", "{'cmd':'secret.create'}");
	charge_drop(&filler);
	assert_int_equal(account->bytes[ACCOUNT_ATTACHES], held);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, pair_setup, pair_teardown)

int main(void)
{
	const struct CMUnitTest tests[] = {
		cmocka_unit_test(replies_unread_are_charged),
		cmocka_unit_test(page_is_charged_as_it_is_touched),
		CASE(notifications_are_charged_to_sender),
		CASE(attachments_and_secrets_are_charged_to_their_session),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
