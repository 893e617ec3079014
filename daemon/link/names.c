/* SPDX-License-Identifier: Apache-2.0 */
#include "daemon/link/names.h"

#include "daemon/base/context.h"
#include "daemon/base/err.h"

int names_get(const struct kvd *kvd, const struct names **names_p)
{
	*names_p = kvd->names;
	return kvd->names ? 0
			  : err_raise(ERR_STATE, "this kvd was built without the "
						 "module cluster; name endpoints");
}
