/* SPDX-License-Identifier: Apache-2.0 */
/*
 * A pool ties a layout to regions. Its regions are pinned first, some per turn while the
 * session's next lines wait, so that none can be removed while the layout is parsed on a
 * helper (a layout may fill a whole line: 1 MiB of JSON). Then each buffer must lie
 * inside its region; later code need not check whether the address of a checked plan
 * exists.
 *
 * Closing has two conditions, in any order: no room uses the pool, and no peer can name
 * it any more (the handshake's withdrawal is done). Only then the pins are released, and
 * possibly the regions with them.
 */
#include "daemon/session/pool.h"

#include <assert.h>
#include <errno.h>
#include <stdio.h>

#include "daemon/base/log.h"
#include "daemon/base/mem.h"
#include "daemon/config/config.h"
#include "daemon/base/context.h"
#include "daemon/loop/offload.h"
#include "daemon/loop/work.h"
#include "daemon/session/session.h"
#include "proto/json.h"

/* a pool and the private data of this file */
struct making {
	struct pool pool;
	struct kvd *kvd;
	struct loop_work reading; /* of the regions' entries */
	const cJSON *entry;	  /* the next one */
	int read;		  /* negative: an entry is wrong */
	struct offload_job job;
	struct charge charge;
	const cJSON *layout_json;
	uint32_t buffer_count; /* of pool.buffers, while there is no layout */
	bool withdrawn;	       /* closing: peers do not know it any more */
	bool starts;	       /* in pool_register() */
	void (*on_done)(void *arg, struct pool *pool, const struct err *err);
	void (*on_closed)(void *arg);
	void *arg;
};

static struct making *making_of(struct pool *pool)
{
	return container_of(pool, struct making, pool);
}

/* ---- pins ---- */

static void making_free(struct making *m)
{
	for (uint32_t i = 0; i < m->buffer_count; i++) {
		struct pool_buffer *buffer = &m->pool.buffers[i];

		buffer->region->pools -= buffer->first;
		region_unpin(buffer->region);
	}
	charge_drop(&m->charge);
	layout_free(m->pool.layout);
	mem_free(m->pool.packed);
	mem_free(m->pool.no_target);
	mem_free(m->pool.buffers);
	for (size_t i = 0; i < ARRAY_LEN(m->pool.tables); i++)
		mem_free(m->pool.tables[i]);
	mem_free(m);
}

/* ---- registering ---- */

static int buffer_read(struct making *m, const cJSON *entry)
{
	static const char *const names[] = {"region", "offset", NULL};
	struct pool_buffer *buffer = &m->pool.buffers[m->buffer_count];
	int64_t id = 0;
	int r;

	if (!cJSON_IsObject(entry))
		return err_raise(ERR_INVAL, "expected an object {region, offset}");
	r = json_only(entry, names);
	if (r == 0)
		r = json_get_int(entry, "region", true, 0, JSON_INT_MAX, &id);
	if (r == 0)
		r = json_get_u64(entry, "offset", false, &buffer->offset);
	if (r < 0)
		return err_pass(r);
	buffer->region = region_find(m->pool.session, (uint64_t)id);
	if (!buffer->region)
		return err_pass(-ENOENT);
	if (buffer->region->kind == REGION_FILE)
		return err_raise(ERR_INVAL,
				 "region %ju is a file; a pool consists of memory "
				 "regions",
				 (uintmax_t)buffer->region->id);
	region_pin(buffer->region);
	buffer->first = buffer->region->pool_mark != m->pool.id;
	buffer->region->pool_mark = m->pool.id;
	buffer->region->pools += buffer->first;
	m->buffer_count++;
	return 0;
}

static bool pool_read_step(struct loop_work *work)
{
	struct making *m = container_of(work, struct making, reading);

	m->read = buffer_read(m, m->entry);
	if (m->read < 0)
		m->read = err_prefix(m->read, "regions[%u]", m->buffer_count);
	m->entry = m->entry->next;
	return m->read >= 0 && m->entry;
}

/* Both when all entries are read and when one is wrong. */
static void pool_read_done(struct loop_work *work)
{
	struct making *m = container_of(work, struct making, reading);
	struct session *session = m->pool.session;
	struct err err;

	if (--session->walking == 0 && session->conn)
		session->conn_ops->resume(session->conn);
	if (m->read >= 0) {
		offload_submit(m->kvd->offload, &m->job);
		return;
	}
	if (m->starts)
		return; /* pool_register() returns it */
	err_take(&err);
	m->on_done(m->arg, NULL, &err);
	making_free(m);
	session_drain_end(session);
}

static int buffers_begin(struct making *m, const cJSON *regions)
{
	int count = cJSON_GetArraySize(regions);

	if (count < 1 || (unsigned int)count > LAYOUT_BUFFERS_MAX)
		return err_raise(ERR_RANGE, "regions: %d entries are not in 1 … %u",
				 count, LAYOUT_BUFFERS_MAX);
	m->pool.buffers = mem_calloc((size_t)count, sizeof(*m->pool.buffers));
	if (!m->pool.buffers)
		return err_pass(-ENOMEM);
	m->entry = regions->child;
	return 0;
}

/* For pool_check_target(): it takes long where fields are many. */
static int target_check(struct pool *pool)
{
	struct err why;

	if (layout_check_target(pool->layout) >= 0)
		return 0;
	err_take(&why);
	if (why.code == ERR_NOMEM)
		return err_reraise(&why);
	pool->no_target = mem_dup(&why, sizeof(why));
	return pool->no_target ? 0 : err_pass(-ENOMEM);
}

static void pool_parse_work(struct offload_job *job)
{
	struct making *m = container_of(job, struct making, job);

	job->result = err_prefix(layout_parse(m->layout_json, &m->pool.layout), "layout");
	if (job->result >= 0)
		job->result = layout_pack(m->pool.layout, &m->pool.packed,
					  &m->pool.packed_bytes, &m->pool.digest);
	if (job->result >= 0)
		job->result = target_check(&m->pool);
}

static int pool_buffers_check(const struct making *m)
{
	const struct layout *layout = m->pool.layout;

	if (layout->buffer_count != m->buffer_count)
		return err_raise(ERR_INVAL,
				 "regions: %u entries for the layout's %u buffers",
				 m->buffer_count, layout->buffer_count);
	for (uint32_t i = 0; i < m->buffer_count; i++) {
		const struct pool_buffer *buffer = &m->pool.buffers[i];
		uint64_t length = buffer->region->length;

		if (buffer->offset > length ||
		    layout->buffers[i] > length - buffer->offset)
			return err_raise(ERR_RANGE,
					 "regions[%u]: buffer of %ju bytes at offset %ju "
					 "is beyond the region's %ju bytes",
					 i, (uintmax_t)layout->buffers[i],
					 (uintmax_t)buffer->offset, (uintmax_t)length);
	}
	return 0;
}

/* A region may have started to close since it was pinned: the session has ended or its
 * memory was freed. */
static int making_finish(struct making *m)
{
	struct session *session = m->pool.session;
	int r;

	if (session->ending)
		return err_raise(ERR_SESSION, "the session has ended");
	r = pool_buffers_check(m);
	if (r == 0)
		r = charge_take(&m->charge, session->account, ACCOUNT_LAYOUTS,
				sizeof(*m) + layout_memory(m->pool.layout) +
					m->pool.packed_bytes +
					m->buffer_count * sizeof(*m->pool.buffers));
	if (r == 0)
		r = idmap_put(&session->pools, m->pool.id, &m->pool);
	if (r < 0)
		return err_pass(r);
	MODULES_EACH(m->kvd, module)
	{
		if (module->pool_coming)
			module->pool_coming(&m->pool);
	}
	r = m->kvd->publisher ? m->kvd->publisher->publish(&m->pool) : 0;
	if (r < 0) {
		idmap_remove(&session->pools, m->pool.id);
		return err_pass(r);
	}
	metrics_add(&m->kvd->metrics, METRIC_POOLS, 1);
	log_debug("pool", m->pool.name, "registered", "session=%ju pool=%ju buffers=%u",
		  (uintmax_t)session->id, (uintmax_t)m->pool.id, m->buffer_count);
	return 0;
}

static void pool_parse_done(struct offload_job *job)
{
	struct making *m = container_of(job, struct making, job);
	struct session *session = m->pool.session;
	struct err err = job->err;
	int r = job->result;

	if (r == 0) {
		r = making_finish(m);
		if (r < 0)
			err_take(&err);
	}
	m->on_done(m->arg, r < 0 ? NULL : &m->pool, &err);
	if (r < 0)
		making_free(m);
	session_drain_end(session);
}

static int register_check(const struct session *session)
{
	uint32_t cap = session->kvd->config->session_pools_max;

	if (session->ending)
		return err_raise(ERR_SESSION, "the session has ended");
	if (idmap_count(&session->pools) >= cap && !session->own)
		return err_raise(ERR_LIMIT,
				 "%u pools in the session (limit: option session_pools)",
				 cap);
	return 0;
}

int pool_register(struct session *session, const struct pool_args *args,
		  void (*on_done)(void *arg, struct pool *pool, const struct err *err),
		  void *arg)
{
	struct making *m;
	int r = register_check(session);

	assert(on_done);
	if (r < 0)
		return err_pass(r);
	m = mem_zalloc(sizeof(*m));
	if (!m)
		return err_pass(-ENOMEM);
	m->kvd = session->kvd;
	m->pool.id = ++m->kvd->next_pool_id;
	m->pool.session = session;
	snprintf(m->pool.name, sizeof(m->pool.name), "%s", args->name);
	m->layout_json = args->layout;
	m->on_done = on_done;
	m->arg = arg;
	r = buffers_begin(m, args->regions);
	if (r < 0) {
		making_free(m);
		return err_pass(r);
	}
	m->job = (struct offload_job){.work = pool_parse_work,
				      .done = pool_parse_done,
				      .principal = session_principal(session)};
	session_drain_begin(session);
	session->walking++;
	m->starts = true;
	loop_work_init(&m->reading, m->kvd->loop, pool_read_step, pool_read_done);
	loop_work_start(&m->reading);
	m->starts = false;
	if (m->read >= 0)
		return 0;
	r = m->read;
	making_free(m);
	session_drain_end(session);
	return err_pass(r);
}

/* ---- use and end ---- */

struct pool *pool_find(struct session *session, uint64_t id)
{
	struct pool *pool = idmap_get(&session->pools, id);

	return session_found(pool && !pool->closing ? pool : NULL, "pool", id);
}

int pool_check_target(struct pool *pool)
{
	if (!pool->no_target)
		return 0;
	return err_prefix(err_reraise(pool->no_target), "pool %llu",
			  (unsigned long long)pool->id);
}

static void pool_close_step(struct pool *pool)
{
	struct making *m = making_of(pool);
	struct session *session = pool->session;
	void (*on_closed)(void *arg) = m->on_closed;
	void *arg = m->arg;

	if (!pool->closing || !m->withdrawn || pool->rooms)
		return;
	idmap_remove(&session->pools, pool->id);
	metrics_sub(&m->kvd->metrics, METRIC_POOLS, 1);
	making_free(m);
	if (on_closed)
		on_closed(arg);
	session_drain_end(session);
}

void pool_use(struct pool *pool)
{
	assert(pool->session);
	assert(!pool->closing);
	pool->rooms++;
}

void pool_use_again(struct pool *pool)
{
	assert(pool->rooms > 0);
	pool->rooms++;
}

void pool_unuse(struct pool *pool)
{
	assert(pool->rooms > 0);
	pool->rooms--;
	pool_close_step(pool);
}

static void on_withdrawn(void *arg)
{
	struct making *m = arg;

	m->withdrawn = true;
	pool_close_step(&m->pool);
}

void pool_close(struct pool *pool, void (*on_closed)(void *arg), void *arg)
{
	struct making *m = making_of(pool);

	assert(!pool->closing);
	pool->closing = true;
	m->on_closed = on_closed;
	m->arg = arg;
	session_drain_begin(pool->session);
	MODULES_EACH(m->kvd, module)
	{
		if (module->pool_going)
			module->pool_going(pool);
	}
	if (m->kvd->publisher)
		m->kvd->publisher->withdraw(pool, on_withdrawn, m);
	else
		on_withdrawn(m);
}

void pools_close(struct session *session)
{
	struct idmap_cursor it;

	assert(session->ending);
	idmap_foreach(&session->pools, it) {
		struct pool *pool = it.value;

		if (!pool->closing)
			pool_close(pool, NULL, NULL);
	}
}
