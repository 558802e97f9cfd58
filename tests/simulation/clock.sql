-- A clock that stands still until it is moved. `sim` comes before `pg_catalog` in the search path of the simulation's
-- sessions, so that these functions answer wherever our statements ask for the time.

create schema sim;

-- What the clock showed from which real instant on. A transaction that was open when it was moved still has the time at
-- which it began, as with the real now().
create table sim.ticks (
    real timestamptz primary key default clock_timestamp(),
    at timestamptz not null
);

-- plpgsql keeps the plan of what it asks for; a function in plain SQL would make it anew in each statement.
create function sim.at(instant timestamptz) returns timestamptz language plpgsql stable as $$
begin
    return (select at from sim.ticks where real <= instant order by real desc limit 1);
end $$;

create function sim.now() returns timestamptz language sql stable return sim.at(pg_catalog.now());
create function sim.transaction_timestamp() returns timestamptz language sql stable return sim.at(pg_catalog.now());
create function sim.statement_timestamp() returns timestamptz language sql stable
    return sim.at(pg_catalog.statement_timestamp());

grant usage on schema sim to tocsin_owner, tocsin_engine, tocsin_app;
grant select on sim.ticks to tocsin_owner, tocsin_engine, tocsin_app;

-- Defaults were bound to the real clock when the migrations ran.
do $$
declare d record;
begin
    for d in select a.attrelid::regclass as of, a.attname
               from pg_attrdef f
               join pg_attribute a on a.attrelid = f.adrelid and a.attnum = f.adnum
               join pg_class c on c.oid = f.adrelid
              where c.relnamespace = 'tocsin'::regnamespace and pg_get_expr(f.adbin, f.adrelid) ~ '\mnow\(\)'
    loop
        execute format('alter table %s alter column %I set default sim.now()', d.of, d.attname);
    end loop;
end $$;
