/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/base/module.h"

#include <string.h>

#include "daemon/base/context.h"
#include "daemon/base/err.h"

static size_t bytes_of(const struct module *m, size_t member)
{
	const size_t align = _Alignof(max_align_t);
	size_t bytes;

	memcpy(&bytes, (const uint8_t *)m + member, sizeof(bytes));
	return (bytes + align - 1) / align * align;
}

size_t modules_part_bytes(const struct kvd *kvd, size_t member)
{
	size_t bytes = 0;

	MODULES_EACH(kvd, m)
	{
		bytes += bytes_of(m, member);
	}
	return bytes;
}

void modules_part_place(const struct kvd *kvd, size_t member, void *at,
			void *part[MODULES])
{
	uint8_t *next = at;

	MODULES_EACH(kvd, m)
	{
		if (!bytes_of(m, member))
			continue;
		part[m->id] = next;
		next += bytes_of(m, member);
	}
}

int modules_new(struct kvd *kvd)
{
	int r = 0;

	MODULES_EACH(kvd, m)
	{
		if (r >= 0 && m->new)
			r = m->new (kvd, &kvd->part[m->id]);
	}
	return err_pass(r);
}

int modules_reload(struct kvd *kvd, bool apply)
{
	int r = 0;

	MODULES_EACH(kvd, m)
	{
		if (r >= 0 && m->reload && kvd->part[m->id])
			r = m->reload(kvd->part[m->id], apply);
	}
	return err_pass(r);
}

void modules_drain(struct kvd *kvd)
{
	MODULES_EACH(kvd, m)
	{
		if (m->drain && kvd->part[m->id])
			m->drain(kvd->part[m->id]);
	}
}

unsigned int modules_live(const struct kvd *kvd)
{
	unsigned int live = 0;

	MODULES_EACH(kvd, m)
	{
		if (m->live && kvd->part[m->id])
			live += m->live(kvd->part[m->id]);
	}
	return live;
}

void modules_close(struct kvd *kvd, const struct err *why)
{
	MODULES_EACH(kvd, m)
	{
		if (m->close && kvd->part[m->id])
			m->close(kvd->part[m->id], why);
	}
}

bool modules_drained(const struct kvd *kvd, struct err *why_p)
{
	*why_p = (struct err){.code = ERR_OK};
	MODULES_EACH(kvd, m)
	{
		if (m->drained && kvd->part[m->id] &&
		    !m->drained(kvd->part[m->id], why_p))
			return false;
	}
	return true;
}

void modules_free(struct kvd *kvd)
{
	unsigned int count = 0;

	MODULES_EACH(kvd, m)
	count++;
	while (count-- > 0) {
		const struct module *m = kvd->modules[count];

		if (!m->free || !kvd->part[m->id])
			continue;
		m->free(kvd->part[m->id]);
		kvd->part[m->id] = NULL;
	}
}
