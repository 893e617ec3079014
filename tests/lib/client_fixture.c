/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A client, its scripted daemon, and what most tests of libkvd begin with. Answers are
 * taken in the order of the lines that come in, also of those that nobody waits for:
 * what makes something here leaves no line unanswered behind it.
 */
#include "tests/lib/client_fixture.h"

#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "proto/base64.h"

static int setup(void **state, bool manual)
{
	struct client_fixture *f = calloc(1, sizeof(*f));
	struct kvd_options o = {
		.client = "test", .timeout_ms = 20000, .manual_reconnect = manual};

	fake_kvd_start(&f->fake);
	o.socket = fake_kvd_path(f->fake);
	assert_int_equal(kvd_open(&o, &f->client), 0);
	*state = f;
	return 0;
}

int client_fixture_setup(void **state)
{
	return setup(state, true);
}

int client_fixture_setup_auto(void **state)
{
	return setup(state, false);
}

int client_fixture_teardown(void **state)
{
	struct client_fixture *f = *state;

	assert_int_equal(kvd_close(f->client), 0);
	fake_kvd_free(f->fake);
	free(f);
	return 0;
}

void client_on_done(void *arg, int result, const struct kvd_reply *reply)
{
	struct client_fixture *f = arg;

	f->done++;
	f->result = result;
	if (reply->error)
		f->error = *reply->error;
}

/* The last line that came in, without its id; waits for `n` lines in all. */
const char *client_line_args(struct client_fixture *f, unsigned int n)
{
	return strstr(fake_kvd_line(f->fake, n, NULL), "\"cmd\"");
}

void client_poll_until(struct client_fixture *f, unsigned int done)
{
	for (unsigned int i = 0; f->done < done && i < 2000; i++)
		kvd_poll(f->client, 10);
	assert_int_equal(f->done, done);
}

struct kvd_region *client_region_make(struct client_fixture *f)
{
	int fd = memfd_create("region", MFD_ALLOW_SEALING | MFD_CLOEXEC);
	struct kvd_region_args args = {.fd = fd, .bytes = 4096};
	struct kvd_region *region;

	fake_kvd_answer(f->fake, OK ",\"region\":3,\"bytes\":4096}");
	assert_int_equal(kvd_region_register(f->client, &args, NULL, &region), 0);
	close(fd);
	return region;
}

struct kvd_pool *client_pool_make(struct client_fixture *f)
{
	struct kvd_region *region = client_region_make(f);
	struct kvd_pool_args args = {
		.layout = "{\"rank\":0}", .regions = &region, .region_count = 1};
	struct kvd_pool *pool;

	fake_kvd_answer(f->fake, OK ",\"pool\":4,\"bytes\":4096}");
	assert_int_equal(kvd_pool_register(f->client, &args, NULL, &pool), 0);
	return pool;
}

/* hello, region.register, pool.register and room.open are lines 0 … 3. */
struct kvd_room *client_room_make(struct client_fixture *f, unsigned int slot,
				  uint32_t gen)
{
	struct kvd_room_args args = {
		.room = 77, .role = KVD_SEND, .pool = client_pool_make(f)};
	struct kvd_room *room;
	char answer[128];

	snprintf(answer, sizeof(answer),
		 "{\"id\":%%ID%%,\"ok\":true,\"room\":\"77\",\"slot\":%u,\"gen\":\"%u\"}",
		 slot, gen);
	fake_kvd_word(f->fake, slot, gen, KVD_BOOTSTRAPPING, 0, 0);
	fake_kvd_answer(f->fake, answer);
	assert_int_equal(kvd_room_open(f->client, &args, NULL, &room), 0);
	return room;
}

void client_lists_make(struct client_fixture *f, uint32_t rows, struct client_lists *l)
{
	const struct kvd_session_key key = {.epoch = 5, .secret = "00ff"};
	struct kvd_desc *descs = calloc(rows, sizeof(*descs));

	for (uint32_t i = 0; i < rows; i++)
		descs[i] = (struct kvd_desc){.address = 4096 * (i + 1), .bytes = 64};
	fake_kvd_answer(f->fake, OK ",\"attach\":2}");
	assert_int_equal(kvd_peer_attach(f->client, "tcp://h:1", &key, NULL, &l->attach),
			 0);
	assert_int_equal(kvd_dlist_prep(f->client, 0, descs, rows, 4, &l->local), 0);
	assert_int_equal(kvd_dlist_prep(f->client, l->attach, descs, rows, 4, &l->remote),
			 0);
	free(descs);
	client_poll_answered(f);
}

void client_poll_answered(struct client_fixture *f)
{
	for (unsigned int i = 0; kvd_pending(f->client) && i < 2000; i++)
		kvd_poll(f->client, 10);
	assert_int_equal(kvd_pending(f->client), 0);
}

static size_t member(const char *line, const char *name, uint8_t *out, size_t max)
{
	const char *at = strstr(line, name), *end;
	cleanup_free uint8_t *bytes = calloc(1, strlen(line));
	size_t len;

	assert_non_null(at);
	at += strlen(name);
	end = strchr(at, '"');
	assert_non_null(end);
	assert_true(base64_decode(at, (size_t)(end - at), bytes, &len));
	assert_true(len <= max);
	if (len)
		memcpy(out, bytes, len);
	return len;
}

size_t client_submitted(struct client_fixture *f, unsigned int n,
			struct kvd_ring_entry *entry_p, uint8_t *data, size_t data_max)
{
	const char *line = client_line_args(f, n);

	assert_non_null(strstr(line, "xfer.submit"));
	assert_int_equal(
		member(line, "\"entry\":\"", (uint8_t *)entry_p, sizeof(*entry_p)),
		sizeof(*entry_p));
	return member(line, "\"data\":\"", data, data_max);
}
