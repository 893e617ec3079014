/* SPDX-License-Identifier: Apache-2.0 */
/*
 * Regions through the control socket: every kind, every refusal, the same memory
 * twice, pins that hold a closing region, and the interval map. The transports
 * are stand-ins that count registrations, so that nothing can be freed under a
 * pretended DMA unseen.
 */
#include "daemon/session/region.h"

#include <errno.h>
#include <fcntl.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "daemon/base/mem.h"
#include "daemon/session/region_map.h"
#include "daemon/session/session.h"
#include "tests/lib/control_client.h"
#include "tests/lib/file.h"
#include "tests/lib/limits.h"
#include "tests/lib/tmp.h"

#define MIB (1 << 20)

/* ---- stand-in transports ---- */

struct fake_transport {
	struct transport base; /* first */
	atomic_int registered;
	atomic_bool refuses;
};

static struct region *at(const struct region_map *map, uint64_t address, uint64_t len)
{
	size_t place;

	return region_map_index(map, address, len, &place) ? region_map_at(map, place)
							   : NULL;
}

static int fake_reg(struct transport *transport, struct memory *memory,
		    struct xp_reg **reg_p)
{
	struct fake_transport *fake =
		container_of(transport, struct fake_transport, base);
	struct xp_reg_base *reg;

	if (atomic_load(&fake->refuses))
		return err_raise(ERR_IMPORT, "not this kind");
	reg = mem_zalloc(sizeof(*reg));
	if (!reg)
		return err_pass(-ENOMEM);
	*reg = (struct xp_reg_base){.transport = transport, .memory = memory_ref(memory)};
	atomic_fetch_add(&fake->registered, 1);
	*reg_p = (struct xp_reg *)reg;
	return 0;
}

static void fake_dereg(struct xp_reg *reg)
{
	struct xp_reg_base *base = (struct xp_reg_base *)(void *)reg;

	atomic_fetch_sub(
		&container_of(base->transport, struct fake_transport, base)->registered,
		1);
	memory_unref(base->memory);
	mem_free(base);
}

static const struct transport_ops fake_ops = {
	.name = "stand-in", .mem_reg = fake_reg, .mem_dereg = fake_dereg};

/* ---- the stage ---- */

struct stage {
	struct mini mini;
	struct client client;
	struct fake_transport transports[2];
};

static int start(void **state)
{
	struct stage *stage = mem_zalloc(sizeof(*stage));

	mini_config(&stage->mini);
	for (unsigned int i = 0; i < 2; i++) {
		stage->transports[i].base.ops = &fake_ops;
		stage->mini.kvd.transports[i] = &stage->transports[i].base;
	}
	stage->mini.kvd.transport_count = 2;
	mini_start(&stage->mini);
	client_open(&stage->client, &stage->mini);
	*state = stage;
	return 0;
}

static int stop(void **state)
{
	struct stage *stage = *state;

	client_close(&stage->client);
	mini_stop(&stage->mini);
	for (unsigned int i = 0; i < 2; i++)
		assert_int_equal(atomic_load(&stage->transports[i].registered), 0);
	mem_free(stage);
	return 0;
}

static struct session *only_session(struct stage *stage)
{
	return list_first(&stage->mini.kvd.sessions, struct session, link);
}

static int64_t register_memfd(struct stage *stage, int fd, size_t bytes)
{
	cJSON *reply =
		client_call_fd(&stage->client, fd,
			       "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			       "\"length\":%zu}",
			       bytes);
	int64_t id = reply_int(reply, "region");

	cJSON_Delete(reply);
	return id;
}

static int64_t register_memory(struct stage *stage, size_t bytes)
{
	int fd = memfd_filled(bytes, 7);
	int64_t id = register_memfd(stage, fd, bytes);

	close(fd);
	return id;
}

/* ---- memfd ---- */

static void memfd_registered_is_listed_and_unregistered(void **state)
{
	struct stage *stage = *state;
	int fd = memfd_filled(MIB, 0x5a);
	cJSON *reply = client_call_fd(
		&stage->client, fd,
		"{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
		"\"offset\":4096,\"length\":\"8192\",\"address\":\"65536\","
		"\"name\":\"cache\"}");
	int64_t id = reply_int(reply, "region");
	struct region *region;

	close(fd);
	assert_int_equal(reply_int(reply, "bytes"), 8192);
	assert_true(cJSON_IsTrue(cJSON_GetObjectItem(reply, "writable")));
	cJSON_Delete(reply);
	region = region_find(only_session(stage), (uint64_t)id);
	assert_non_null(region);
	assert_int_equal(region->memory->base[8191], 0x5a);
	assert_int_equal(atomic_load(&stage->transports[0].registered), 1);
	assert_int_equal(atomic_load(&stage->transports[1].registered), 1);
	assert_ptr_equal(at(only_session(stage)->region_map, 65536 + 100, 8092), region);
	assert_null(at(only_session(stage)->region_map, 65536 + 100, 8093));
	reply = client_call(&stage->client, "{\"cmd\":\"region.list\"}");
	const cJSON *entry = cJSON_GetObjectItem(reply, "regions")->child;

	assert_int_equal(reply_int(entry, "region"), id);
	assert_int_equal(reply_int(entry, "bytes"), 8192);
	assert_string_equal(cJSON_GetObjectItem(entry, "name")->valuestring, "cache");
	assert_string_equal(cJSON_GetObjectItem(entry, "address")->valuestring, "65536");
	assert_true(cJSON_IsFalse(cJSON_GetObjectItem(entry, "dead")));
	cJSON_Delete(reply);
	client_call_ok(&stage->client, "{\"cmd\":\"region.unregister\",\"region\":%jd}",
		       (intmax_t)id);
	assert_null(region_find(only_session(stage), (uint64_t)id));
	assert_null(at(only_session(stage)->region_map, 65536, 1));
	assert_int_equal(atomic_load(&stage->transports[0].registered), 0);
	client_call_fails(&stage->client, "ENOTFOUND",
			  "{\"cmd\":\"region.unregister\",\"region\":%jd}", (intmax_t)id);
}

/* Also the other way round: another object of the same size is another region. */
static void same_memory_twice_is_one_region(void **state)
{
	struct stage *stage = *state;
	int fd = memfd_filled(MIB, 1), other = memfd_filled(MIB, 1), again = dup(fd);
	int64_t id = register_memfd(stage, fd, MIB);

	assert_int_equal(register_memfd(stage, again, MIB), id);
	assert_int_not_equal(register_memfd(stage, other, MIB), id);
	assert_int_not_equal(register_memfd(stage, fd, MIB - 4096), id);
	close(again);
	close(other);
	assert_int_equal(atomic_load(&stage->transports[0].registered), 3);
	for (int i = 0; i < 2; i++) {
		assert_non_null(region_find(only_session(stage), (uint64_t)id));
		client_call_ok(&stage->client,
			       "{\"cmd\":\"region.unregister\",\"region\":%jd}",
			       (intmax_t)id);
	}
	assert_null(region_find(only_session(stage), (uint64_t)id));
	assert_int_equal(atomic_load(&stage->transports[0].registered), 2);
	assert_int_not_equal(register_memfd(stage, fd, MIB), id);
	close(fd);
}

/* Two imports of the same memory at the same time meet at their end. */
static void same_memory_twice_at_once_is_one_region(void **state)
{
	struct stage *stage = *state;
	int fd = memfd_filled(MIB, 1);
	int64_t ids[6];

	for (int i = 0; i < 6; i++)
		client_send_fds(
			&stage->client,
			"{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			"\"length\":1048576}\n",
			&fd, 1);
	close(fd);
	for (int i = 0; i < 6; i++) {
		cJSON *reply = client_reply(&stage->client);

		ids[i] = reply_int(reply, "region");
		assert_int_equal(ids[i], ids[0]);
		cJSON_Delete(reply);
	}
	while (idmap_count(&only_session(stage)->regions) > 1)
		mini_turn(&stage->mini);
	assert_int_equal(region_find(only_session(stage), (uint64_t)ids[0])->registered,
			 6);
	assert_int_equal(atomic_load(&stage->transports[0].registered), 1);
}

static void memfd_read_only_is_a_source_only(void **state)
{
	struct stage *stage = *state;
	int fd = memfd_filled(8192, 3), ro;
	char path[40];
	cJSON *reply;

	snprintf(path, sizeof(path), "/proc/self/fd/%d", fd);
	ro = open(path, O_RDONLY | O_CLOEXEC);
	reply = client_call_fd(&stage->client, ro,
			       "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			       "\"length\":8192}");
	assert_true(cJSON_IsFalse(cJSON_GetObjectItem(reply, "writable")));
	expect_ok(reply);
	close(ro);
	close(fd);
}

static void memory_unusable_refused(void **state)
{
	static const struct {
		const char *fields, *code;
	} wrong[] = {
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":0", "ERANGE"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":8193", "ERANGE"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":4096,\"offset\":8192", "ERANGE"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":\"18446744073709551615\"",
		 "ERANGE"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":1,\"offset\":"
		 "\"18446744073709551615\"",
		 "ERANGE"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":4096,"
		 "\"address\":\"18446744073709551615\"",
		 "ERANGE"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":-1", "EINVAL"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":1.5", "EINVAL"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":1e308", "EINVAL"},
		{"\"kind\":\"memfd\",\"fd\":-1,\"length\":4096", "ERANGE"},
		{"\"kind\":\"memfd\",\"fd\":0.5,\"length\":4096", "EINVAL"},
		{"\"kind\":\"memfd\",\"fd\":0", "EINVAL"},
		{"\"kind\":\"memfd\",\"fd\":0,\"length\":4096,\"shm_name\":\"/x\"",
		 "EINVAL"},
		{"\"kind\":\"cuda_ipc\",\"fd\":0,\"length\":4096", "EINVAL"},
		{"\"kind\":\"shm\",\"fd\":0,\"shm_name\":\"/x\",\"length\":4096",
		 "EINVAL"},
		/* by the pid there is nothing, and the fd is another file's */
		{"\"kind\":\"vm\",\"fd\":0,\"address\":\"4096\",\"length\":4096",
		 "EIMPORT"},
	};
	struct stage *stage = *state;
	int fd = memfd_filled(8192, 3), pipes[2], unsealable;

	for (size_t i = 0; i < ARRAY_LEN(wrong); i++)
		expect_code(client_call_fd(&stage->client, fd,
					   "{\"cmd\":\"region.register\",%s}",
					   wrong[i].fields),
			    wrong[i].code);
	close(fd);
	assert_int_equal(pipe2(pipes, O_CLOEXEC), 0);
	expect_code(
		client_call_fd(&stage->client, pipes[0],
			       "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			       "\"length\":4096}"),
		"EIMPORT");
	expect_code(
		client_call_fd(&stage->client, pipes[0],
			       "{\"cmd\":\"region.register\",\"kind\":\"shm\",\"fd\":0,"
			       "\"length\":4096}"),
		"EIMPORT");
	close(pipes[0]);
	close(pipes[1]);
	unsealable = memfd_unsealable();
	assert_int_equal(ftruncate(unsealable, 4096), 0);
	expect_code(
		client_call_fd(&stage->client, unsealable,
			       "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			       "\"length\":4096}"),
		"EIMPORT");
	assert_int_equal(idmap_count(&only_session(stage)->regions), 0);
	/* it can be cut: as what is POSIX shared memory */
	expect_ok(client_call_fd(&stage->client, unsealable,
				 "{\"cmd\":\"region.register\",\"kind\":\"shm\",\"fd\":0,"
				 "\"length\":4096}"));
	assert_int_equal(idmap_count(&only_session(stage)->regions), 1);
	expect_code(
		client_call_fd(&stage->client, unsealable,
			       "{\"cmd\":\"region.register\",\"kind\":\"shm\",\"fd\":0,"
			       "\"length\":8192}"),
		"ERANGE");
	client_call_fails(&stage->client, "EINVAL",
			  "{\"cmd\":\"region.register\",\"kind\":\"shm\","
			  "\"length\":4096}");
	close(unsealable);
	assert_int_equal(idmap_count(&only_session(stage)->regions), 1);
}

static void region_refused_by_every_transport_is_refused(void **state)
{
	struct stage *stage = *state;
	int fd = memfd_filled(8192, 3);

	atomic_store(&stage->transports[0].refuses, true);
	register_memfd(stage, fd, 8192); /* one of two is enough */
	atomic_store(&stage->transports[1].refuses, true);
	expect_code(
		client_call_fd(&stage->client, fd,
			       "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			       "\"length\":4096}"),
		"EIMPORT");
	close(fd);
	assert_int_equal(idmap_count(&only_session(stage)->regions), 1);
}

static void regions_over_the_cap_refused(void **state)
{
	struct stage *stage = *state;
	int64_t first = 0;
	int fd;

	stage->mini.config.session_regions_max = 3;
	for (int i = 0; i < 3; i++)
		first = register_memory(stage, 4096);
	fd = memfd_filled(4096, 1);
	expect_code(
		client_call_fd(&stage->client, fd,
			       "{\"cmd\":\"region.register\",\"kind\":\"memfd\",\"fd\":0,"
			       "\"length\":4096}"),
		"ELIMIT");
	client_call_ok(&stage->client, "{\"cmd\":\"region.unregister\",\"region\":%jd}",
		       (intmax_t)first);
	register_memfd(stage, fd, 4096);
	close(fd);
}

/* ---- shm and vm ---- */

static void shm_by_name_judged_by_the_clients_rights(void **state)
{
	struct stage *stage = *state;
	struct session *session = only_session(stage);
	char name[64], line[256];
	uid_t uid = session->uid;
	int fd;

	tmp_name(name, sizeof(name), "/kvd-test");
	snprintf(line, sizeof(line),
		 "{\"cmd\":\"region.register\",\"kind\":\"shm\",\"shm_name\":\"%s\","
		 "\"length\":8192}",
		 name);
	client_call_fails(&stage->client, "EIMPORT", "%s", line); /* not there */
	fd = shm_open(name, O_CREAT | O_EXCL | O_RDWR, 0600);
	assert_true(fd >= 0);
	assert_int_equal(file_fill(fd, 8192), 0);
	/* what the daemon may open is not what a foreign client may have */
	session->uid = uid + 12345;
	client_call_fails(&stage->client, "EPERM", "%s", line);
	assert_int_equal(fchmod(fd, 0604), 0);
	session->gid = getgid() + 12345;
	cJSON *reply = client_call(&stage->client, "%s", line);

	assert_true(cJSON_IsFalse(cJSON_GetObjectItem(reply, "writable")));
	expect_ok(reply);
	session->uid = uid;
	reply = client_call(&stage->client, "%s", line);
	assert_true(cJSON_IsTrue(cJSON_GetObjectItem(reply, "writable")));
	expect_ok(reply);
	shm_unlink(name);
	close(fd);
	for (size_t i = 0; i < 3; i++)
		client_call_fails(&stage->client, "EINVAL",
				  "{\"cmd\":\"region.register\",\"kind\":\"shm\","
				  "\"shm_name\":\"%s\",\"length\":4096}",
				  (const char *[]){"no-slash", "/", "/../etc"}[i]);
}

static void vm_of_own_process_is_readable(void **state)
{
	struct stage *stage = *state;
	static char cache[16384];
	int64_t id = client_call_int(&stage->client, "region",
				     "{\"cmd\":\"region.register\",\"kind\":\"vm\","
				     "\"address\":\"%ju\",\"length\":%zu}",
				     (uintmax_t)(uintptr_t)cache, sizeof(cache));
	struct region *region = region_find(only_session(stage), (uint64_t)id);

	assert_int_equal(region->memory->kind, MEMORY_VM);
	assert_int_equal(region->memory->owner.pid, getpid()); /* of SO_PEERCRED */
	assert_ptr_equal(at(only_session(stage)->region_map, (uintptr_t)cache + 5, 16),
			 region);
	client_call_fails(
		&stage->client, "EINVAL",
		"{\"cmd\":\"region.register\",\"kind\":\"vm\",\"length\":4096}");
	client_call_fails(&stage->client, "EINVAL",
			  "{\"cmd\":\"region.register\",\"kind\":\"vm\",\"length\":4096,"
			  "\"address\":\"4096\",\"pid\":1}");
	client_call_fails(&stage->client, "ERANGE",
			  "{\"cmd\":\"region.register\",\"kind\":\"vm\",\"length\":4096,"
			  "\"address\":\"4096\"}");
	client_call_fails(&stage->client, "ERANGE",
			  "{\"cmd\":\"region.register\",\"kind\":\"vm\",\"length\":4096,"
			  "\"address\":\"0\"}");
}

/* ---- pins ---- */

static void region_pinned_closes_when_unpinned(void **state)
{
	struct stage *stage = *state;
	int64_t id = register_memory(stage, 8192);
	struct region *region = region_find(only_session(stage), (uint64_t)id);
	cJSON *reply;

	region_pin(region);
	region_pin(region);
	client_send_fds(&stage->client,
			"{\"id\":9,\"cmd\":\"region.unregister\",\"region\":1}\n", NULL,
			0);
	client_call_fails(&stage->client, "ENOTFOUND",
			  "{\"cmd\":\"region.unregister\",\"region\":%jd}", (intmax_t)id);
	region_unpin(region);
	client_call_ok(&stage->client, "{\"id\":10,\"cmd\":\"ping\"}"); /* still not */
	assert_int_equal(atomic_load(&stage->transports[0].registered), 1);
	assert_int_equal(region->memory->base[0], 7); /* mapped while pinned */
	region_unpin(region);
	reply = client_reply(&stage->client);
	assert_int_equal(reply_int(reply, "id"), 9);
	expect_ok(reply);
	assert_int_equal(atomic_load(&stage->transports[0].registered), 0);
}

/* The session's end waits for what is in flight, not longer. */
static void session_end_waits_for_pins(void **state)
{
	struct stage *stage = *state;
	struct session *session = only_session(stage);
	struct region *region;

	register_memory(stage, 8192);
	region = region_find(session, (uint64_t)register_memory(stage, 4096));
	region_pin(region);
	client_close(&stage->client);
	while (idmap_count(&session->regions) > 1)
		mini_turn(&stage->mini);
	assert_true(session->ending);
	assert_int_equal(region->memory->base[0], 7);
	assert_int_equal(stage->mini.kvd.session_count, 1);
	region_unpin(region);
	mini_until_sessions(&stage->mini, 0);
}

/* Sessions that end at every moment of a registration leave nothing behind. */
static void session_ends_while_importing(void **state)
{
	struct stage *stage = *state;
	int fd = memfd_filled(4 * MIB, 1);

	for (int turns = 0; turns < 6; turns++) {
		struct client client;

		client_open(&client, &stage->mini);
		for (int i = 0; i < 3; i++)
			client_send_fds(&client,
					"{\"cmd\":\"region.register\",\"kind\":\"memfd\","
					"\"fd\":0,\"length\":4194304}\n",
					&fd, 1);
		for (int i = 0; i < turns; i++)
			mini_turn(&stage->mini);
		client_close(&client);
		mini_until_sessions(&stage->mini, 1);
		assert_int_equal(atomic_load(&stage->transports[0].registered), 0);
	}
	close(fd);
}

static void session_sees_only_its_own_regions(void **state)
{
	struct stage *stage = *state;
	int64_t id = register_memory(stage, 8192);
	struct client other;

	client_open(&other, &stage->mini);
	client_call_fails(&other, "ENOTFOUND",
			  "{\"cmd\":\"region.unregister\",\"region\":%jd}", (intmax_t)id);
	cJSON *reply = client_call(&other, "{\"cmd\":\"region.list\"}");

	assert_null(cJSON_GetObjectItem(reply, "regions")->child);
	cJSON_Delete(reply);
	reply = client_call(&other, "{\"cmd\":\"region.list\",\"all\":true}");
	assert_int_equal(
		reply_int(cJSON_GetObjectItem(reply, "regions")->child, "region"), id);
	cJSON_Delete(reply);
	list_entry(stage->mini.kvd.sessions.prev, struct session, link)->admin = false;
	client_call_fails(&other, "EPERM", "{\"cmd\":\"region.list\",\"all\":true}");
	client_call_fails(&other, "EPERM", "{\"cmd\":\"pool.list\",\"all\":true}");
	client_close(&other);
}

/* ---- the interval map, against the obvious ---- */

static struct region *slow_at(struct region *regions, const bool *in, size_t count,
			      uint64_t address, uint64_t len)
{
	struct region *best = NULL;

	for (size_t i = 0; i < count; i++) {
		struct region *r = &regions[i];

		if (!in[i] || r->address > address ||
		    address + len > r->address + r->length)
			continue;
		if (!best || r->address > best->address ||
		    (r->address == best->address && r->length < best->length))
			best = r;
	}
	return best;
}

static void map_random_agrees_with_a_scan(void **state)
{
	enum { COUNT = 60 };
	static struct region regions[COUNT];
	bool in[COUNT] = {false};
	struct region_map *map;
	uint64_t x = 88172645463325252u;

	(void)state;
	assert_int_equal(region_map_new(&map), 0);
	for (int step = 0; step < 60000; step++) {
		size_t i;
		const struct region *fast, *slow;
		uint64_t address, len;

		x ^= x << 13;
		x ^= x >> 7;
		x ^= x << 17;
		i = x % COUNT;
		if (step % 20 == 0 && in[i]) {
			region_map_remove(map, &regions[i]);
			region_map_remove(map, &regions[i]);
			in[i] = false;
		} else if (step % 20 == 0) {
			regions[i].address = 1 + (x >> 8) % 100;
			regions[i].length = 1 + (x >> 20) % ((x >> 40) % 4 ? 20 : 100);
			assert_int_equal(region_map_put(map, &regions[i]), 0);
			in[i] = true;
		}
		address = (x >> 16) % 210;
		len = 1 + (x >> 50) % 8;
		fast = at(map, address, len);
		slow = slow_at(regions, in, COUNT, address, len);
		/* equal ranges are equally good */
		if (fast != slow && !(fast && slow && fast->address == slow->address &&
				      fast->length == slow->length))
			fail_msg("step %d", step);
	}
	assert_null(at(map, UINT64_MAX, 2));
	region_map_free(map);
}

static void map_without_memory_is_unchanged(void **state)
{
	struct region region = {.address = 4096, .length = 10};
	struct region_map *map;

	(void)state;
	assert_int_equal(region_map_new(&map), 0);
	mem_fail_at(1);
	assert_int_equal(region_map_put(map, &region), -ENOMEM);
	mem_fail_at(0);
	assert_null(at(map, 4096, 1));
	assert_int_equal(region_map_put(map, &region), 0);
	assert_ptr_equal(at(map, 4096, 10), &region);
	region_map_free(map);
}

#define CASE(name) cmocka_unit_test_setup_teardown(name, start, stop)

int main(void)
{
	const struct CMUnitTest tests[] = {
		CASE(memfd_registered_is_listed_and_unregistered),
		CASE(same_memory_twice_is_one_region),
		CASE(same_memory_twice_at_once_is_one_region),
		CASE(memfd_read_only_is_a_source_only),
		CASE(memory_unusable_refused),
		CASE(region_refused_by_every_transport_is_refused),
		CASE(regions_over_the_cap_refused),
		CASE(shm_by_name_judged_by_the_clients_rights),
		CASE(vm_of_own_process_is_readable),
		CASE(region_pinned_closes_when_unpinned),
		CASE(session_end_waits_for_pins),
		CASE(session_ends_while_importing),
		CASE(session_sees_only_its_own_regions),
		cmocka_unit_test(map_random_agrees_with_a_scan),
		cmocka_unit_test(map_without_memory_is_unchanged),
	};

	return cmocka_run_group_tests(tests, NULL, NULL);
}
